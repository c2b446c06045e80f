"""The linter's rules that need no server: GPUs that are listed, warm-up that covers too little."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.check import check_repository
from compiler.engine_host import EngineHost, Gpu
from compiler.repository import Repository

CONFIG = """
name: "m"
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""


def _findings(tmp_path: Path, more: str, gpus: int = 0) -> list[tuple[str, str]]:
    (tmp_path / "m" / "1").mkdir(parents=True, exist_ok=True)
    (tmp_path / "m" / "1" / "model.py").write_text("")
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG + more)
    host = EngineHost(gpus=tuple(Gpu("g", "8.6") for _ in range(gpus)))
    return [(f.level, f.message) for f in check_repository(Repository(tmp_path), host=host)]


def test_c16_gpus_that_this_machine_lacks_are_named(tmp_path):
    listed = "instance_group { kind: KIND_GPU gpus: [0, 1, 2] }"
    assert _findings(tmp_path, listed, gpus=3) == []
    assert _findings(tmp_path, listed, gpus=1) == [
        (
            "error",
            "instance_group lists the GPUs [0, 1, 2], and this machine has 1: there is no GPU 1; "
            "without `gpus` every GPU there is gets its instances",
        )
    ]
    assert _findings(tmp_path, "instance_group { kind: KIND_GPU }", gpus=1) == []


def test_c06_a_preferred_batch_size_above_the_largest_is_named_with_both(tmp_path):
    """Also where max_batch_size is absent, which is 0 for the server when it validates."""
    preferred = "dynamic_batching { preferred_batch_size: [2, 9] }"
    assert _findings(tmp_path, preferred) == [("error", "preferred_batch_size 9 is above max_batch_size 8")]
    (tmp_path / "m" / "config.pbtxt").write_text(CONFIG.replace("max_batch_size: 8", "") + preferred)
    found = [f.message for f in check_repository(Repository(tmp_path), host=EngineHost())]
    assert found == ["preferred_batch_size 2 is above max_batch_size 0"]


@pytest.mark.parametrize(("sizes", "warned"), [((), 0), ((8,), 0), ((1, 8), 0), ((1,), 1), ((1, 4), 1)])
def test_c24_a_warm_up_that_leaves_out_the_larger_batches_is_a_warning(tmp_path, sizes, warned):
    entries = "".join(
        f'model_warmup {{ name: "w{s}" batch_size: {s} inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 4 '
        "zero_data: true } } }"
        for s in sizes
    )
    found = _findings(tmp_path, entries)
    assert [level for level, _ in found] == (["warning"] if warned else [])
    if warned:
        shown = ", ".join(map(str, sizes))
        assert f"model_warmup runs batches of {shown}, and max_batch_size is 8" in found[0][1]
