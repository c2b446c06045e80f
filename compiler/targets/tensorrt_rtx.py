"""TensorRT-RTX: TensorRT's sibling for RTX GPUs, which builds engines for named GPUs on a machine that has none.

Its engines are not for Triton's `tensorrt` backend: `backends/tensorrt_rtx/model.py` serves them.
"""

from __future__ import annotations

from compiler.targets.tensorrt import target_of
from compiler.targets.tensorrt_library import TENSORRT_RTX

TARGET = target_of(TENSORRT_RTX, backend="tensorrt_rtx")
