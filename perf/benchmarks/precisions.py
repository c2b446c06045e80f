"""Precisions on ONNX Runtime's CPU: accuracy and speed against fp32 of the same graph, in turn in one process.

    python -m perf.benchmarks.precisions [minilm.onnx]

Threads do not spin between calls: with two sessions on the same cores, those of the one that rests take the other's
(ResNet-18 int8 then reads 23.6 ms instead of the 12.6 ms it takes alone).

Without a file only the ResNet-18 (random weights, batch norms folded) is measured. A MiniLM file may be the exported
graph or the one that `compile build` published; the graph before and after fusion answer which order is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.errors import ModelkilnError
from compiler.precision import CalibrationOptions, convert
from compiler.precision.accuracy import agreement
from compiler.targets.onnxruntime import MODEL_FILE, write_onnx
from compiler.targets.registry import Runner

if TYPE_CHECKING:
    import onnx_ir as ir

THREADS = 2
ROUNDS, CALLS, WARMUP = 9, 5, 2


def resnet18() -> ir.Model:
    """Returns a ResNet-18 at 224x224 with seeded random weights, exported and folded as the compiler does."""
    import torch
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(inputs, outputs, 3, stride, 1)
            self.second = nn.Conv2d(outputs, outputs, 3, 1, 1)
            self.skip = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.second(torch.relu(self.first(x))) + self.skip(x))

    torch.manual_seed(0)
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(Block(*w) for w in [*widths, (512, 512, 1)]),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    ).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
            # What a batch norm before the sum would do: keep the residual path's variance from growing.
            module.weight.data *= 0.7
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.onnx.export(
        model, (torch.zeros(3, 3, 224, 224),), dynamo=True, input_names=["x"], output_names=["y"], opset_version=20,
        dynamic_shapes=({0: batch},), verbose=False,
    )  # fmt: skip
    assert program is not None
    program.optimize()
    return program.model


def measure(
    name: str,
    model: ir.Model,
    precisions: Sequence[tuple[str, CalibrationOptions]],
    samples: Sequence[Mapping[str, AnyArray]],
    held_out: Mapping[str, AnyArray],
    baseline: Runner | None = None,
) -> Runner:
    """Prints a line per precision; returns the fp32 session, for another graph of the same model to compare with."""
    with tempfile.TemporaryDirectory() as folder:
        write_onnx(model.clone(), Path(folder))
        own = _open(Path(folder))
        baseline = baseline or own
        want = baseline(held_out)
        _line(name, "fp32", baseline, own, want, held_out, "")
        for precision, options in precisions:
            started, cpu = time.monotonic(), time.process_time()
            try:
                result = convert(model, precision, "onnxruntime", samples, calibration=options)
            except ModelkilnError as error:
                print(f"{name:22} {precision:13} {error.message[:90]}")
                continue
            write_onnx(result.model, Path(folder))
            size = sum(f.stat().st_size for f in Path(folder).iterdir()) / 1e6
            label = f"{precision} {options.threshold(precision):g}{' clip' if options.method == 'percentile' else ''}"
            spent = f"{time.monotonic() - started:.0f} s, {time.process_time() - cpu:.0f} s of processor"
            extra = f"{len(result.held)} held, {size:.0f} MB, converted in {spent}"
            _line(name, label, baseline, _open(Path(folder)), want, held_out, extra)
    return baseline


def _open(folder: Path) -> Runner:
    """Opens the written file as `targets.onnxruntime` does, but without spinning threads."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(folder / MODEL_FILE), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, dict(inputs)), strict=True))


def _line(
    name: str,
    precision: str,
    baseline: Runner,
    runner: Runner,
    want: Mapping[str, AnyArray],
    inputs: Mapping[str, AnyArray],
    extra: str,
) -> None:
    score = agreement([want], [runner(inputs)])
    pairs = [(_block_ms(baseline, inputs), _block_ms(runner, inputs)) for _ in range(ROUNDS)]
    before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(
        f"{name:22} {precision:16} {before:8.1f} {after:8.1f} {statistics.median(ratios):6.2f}x {spread:>10} "
        f"{score:9.5f}  {extra}",
        flush=True,
    )


def _block_ms(run: Runner, inputs: Mapping[str, AnyArray]) -> float:
    times = []
    for _ in range(WARMUP + CALLS):
        started = time.perf_counter_ns()
        run(inputs)
        times.append((time.perf_counter_ns() - started) / 1e6)
    return statistics.median(times[WARMUP:])


def _tokens(rng: np.random.Generator, batch: int, length: int, padded: bool) -> dict[str, AnyArray]:
    valid = rng.integers(length // 4, length + 1, batch) if padded else np.full(batch, length)
    return {
        "input_ids": rng.integers(1000, 30000, (batch, length)),
        "attention_mask": (np.arange(length) < valid[:, None]).astype(np.int64),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    import onnx_ir

    from compiler.passes.fuse_onnxruntime import fuse_onnxruntime
    from ensembles.text_embedding.calibration import samples as calibration_sentences

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minilm", nargs="?", type=Path)
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    plain, clipped = CalibrationOptions(), CalibrationOptions(method="percentile", percentile=99.99)
    close = CalibrationOptions(min_cosine=0.999)
    print(f"{'graph':22} {'precision':16} {'fp32 ms':>8} {'ms':>8} {'ratio':>7} {'rounds':>10} {'agreement':>9}")
    images = [{"x": rng.standard_normal((2, 3, 224, 224)).astype(np.float32)} for _ in range(6)]
    choices = [("int8", plain), ("fp16", plain)]
    measure("ResNet-18 1x224x224", resnet18(), choices, images, {"x": images[-1]["x"][:1]})
    if options.minilm:
        model = onnx_ir.load(options.minilm)
        samples = list(calibration_sentences())
        held_out = _tokens(rng, 4, 128, False)
        every = [("int8", plain), ("int8", close), ("int8", clipped), ("int8_dynamic", plain), ("int8_dynamic", close)]
        every.append(("fp16", plain))
        fused = fuse_onnxruntime(model.clone()).model
        baseline = measure("MiniLM 4x128 fused", fused, every, samples, held_out)
        measure("MiniLM 4x128 unfused", model, [every[0], every[3]], samples, held_out, baseline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
