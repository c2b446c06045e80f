"""Where a model comes from: one file per kind of source, chosen here. What is trusted and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compiler.source_spec import ExportedProgramSource, FactorySource, HuggingFaceSource, OnnxSource

if TYPE_CHECKING:
    from compiler.sources.base import OpenedSource
    from compiler.spec import ModelSpec


def open_source(spec: ModelSpec, *, trust_pickle: bool = False) -> OpenedSource:
    """Opens the model that the spec names and checks its inputs and outputs by name.

    Args:
        spec: the validated spec.
        trust_pickle: whether files that can run code may be opened; what was is in `OpenedSource.trusted`.

    Raises:
        ModelkilnError: the source does not exist, does not fit the spec, or cannot be opened safely.
    """
    # Each kind is imported where it is opened: one needs torch, another ONNX Runtime, a third transformers.
    source = spec.source
    if isinstance(source, FactorySource):
        from compiler.sources.factory import open_factory

        return open_factory(spec, source, trust_pickle)
    if isinstance(source, OnnxSource):
        from compiler.sources.onnx_file import open_onnx

        return open_onnx(spec, source)
    if isinstance(source, ExportedProgramSource):
        from compiler.sources.exported_program import open_exported_program

        return open_exported_program(spec, source, trust_pickle)
    from compiler.sources.huggingface import open_huggingface

    return open_huggingface(spec, source, trust_pickle)


def source_files(spec: ModelSpec) -> dict[str, Path]:
    """Returns every file that opening the source reads, by the name to record. Imports no torch."""
    source = spec.source
    if isinstance(source, FactorySource):
        from compiler.sources.factory import factory_files

        return factory_files(spec, source)
    if isinstance(source, OnnxSource):
        from compiler.sources.onnx_file import onnx_files

        return onnx_files(spec, source)
    if isinstance(source, ExportedProgramSource):
        from compiler.sources.exported_program import archive_files

        return archive_files(spec, source)
    from compiler.sources.huggingface_folder import folder_files

    return folder_files(spec, source)


def source_packages(spec: ModelSpec) -> tuple[str, ...]:
    """Returns the distributions, besides the target's, whose version changes what the source gives."""
    return ("transformers", "safetensors") if isinstance(spec.source, HuggingFaceSource) else ()
