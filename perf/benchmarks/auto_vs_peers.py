"""`--target auto --precision auto` against what people use without it, with the floors that it must reach.

All in one process, block by block in turn, with the same inputs and number of threads. Between the blocks all rest:
threads that spin on after a call would take the cores from the next one.

    python -m perf.benchmarks.auto_vs_peers [--processor-time] [minilm | resnet18 ...]

On a machine that others use, the wall clock tells how busy they are. With `--processor-time` each runner has one thread
and its processor time counts, which is what the wall clock would show on an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.cases import Case, export_sizes, make_case
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.sources import open_source
from compiler.sources.factory import load_module
from compiler.spec import ModelSpec, Tolerance, model_spec_from_file
from compiler.targets.onnxruntime import MODEL_FILE, write_onnx
from compiler.targets.registry import Runner, target_named
from compiler.verify import compare
from perf.benchmarks.peers import eager, onnxruntime_default, openvino_default, torch_compiled

HERE = Path(__file__).parent
BATCHES = (1, 8)
ROUNDS, WARMUP, CALLS = 9, 2, 5
REST_S = 0.05
EAGER, AUTO = "PyTorch eager", "auto"
MIN_OF_BEST_PEER = 0.97
MIN_COSINE = 0.999
# Nanoseconds that pass: of the wall clock, or of this process's threads.
Clock = Callable[[], int]


@dataclass(frozen=True)
class Contest:
    """One model and how many times faster than eager `auto` must be on it, by batch."""

    title: str
    spec: Path
    times_eager: Mapping[int, float]


CONTESTS = (
    Contest("all-MiniLM-L6-v2, sequence 128", HERE / "minilm.yaml", {1: 4.0, 8: 4.5}),
    Contest("ResNet-18, 224x224", HERE / "resnet18.yaml", {1: 8.0, 8: 8.0}),
)


@dataclass(frozen=True)
class Row:
    """One runner's result.

    Attributes:
        ms: median time of a call in each round.
        cosine: the worst row's, to eager.
    """

    name: str
    ms: tuple[float, ...]
    cosine: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    def ratio(self, to: Row) -> float:
        """Returns how many times faster this is than another: the median of the rounds' ratios."""
        return statistics.median(other / own for own, other in zip(self.ms, to.ms, strict=True))


@dataclass(frozen=True)
class Floor:
    """A limit that was promised, and what was measured."""

    what: str
    least: float
    got: float

    @property
    def passed(self) -> bool:
        return self.got >= self.least

    def line(self) -> str:
        """Returns a line of the report."""
        return f"{'PASS' if self.passed else 'FAIL'}  {self.what}: {self.got:.6g}, at least {self.least:g}"


def bench_auto(threads: int, contests: Sequence[Contest] = CONTESTS, clock: Clock = time.perf_counter_ns) -> bool:
    """Prints a table for each model and batch size; returns whether every floor was met."""
    import torch

    torch.set_num_threads(threads)
    return all([_contest(contest, threads, clock) for contest in contests])


def _contest(contest: Contest, threads: int, clock: Clock) -> bool:
    spec = model_spec_from_file(contest.spec)
    met = True
    with tempfile.TemporaryDirectory(prefix="modelkiln-bench-") as work:
        runners, manifest = open_all(spec, threads, Path(work))
        timed = "wall clock" if clock is time.perf_counter_ns else "processor time"
        print(f"{contest.title}: {threads} thread(s), {ROUNDS} rounds of {CALLS} calls in turn, {timed}")
        print("\n".join(candidate_lines(manifest)))
        flops_each = manifest["graph"]["exported"]["flops"] / spec.dims["batch"].opt
        for batch in BATCHES:
            sizes = {**{name: dim.opt for name, dim in spec.dims.items()}, "batch": batch}
            rows = measure(runners, make_case(spec, "bench", sizes, padded=False), clock)
            floors = floors_of(rows, contest.times_eager[batch])
            lines = [*table(rows, batch, flops_each * batch), *(f"       {floor.line()}" for floor in floors)]
            print("\n".join(lines), end="\n\n", flush=True)
            met = met and all(floor.passed for floor in floors)
    return met


def open_all(spec: ModelSpec, threads: int, work: Path) -> tuple[dict[str, Runner], dict[str, Any]]:
    """Builds `auto` and opens every peer; returns the runners by name and auto's manifest."""
    published = compile_model(spec, Repository(work / "repository")).published
    target = target_named(published.manifest["target"])
    auto = target.open(published.folder, threads, published.manifest["artifact"])
    assert auto is not None
    exported = open_source(spec).export(make_case(spec, "export", export_sizes(spec), padded=False))
    write_onnx(exported.model, work)
    module, output = load_module(spec), spec.outputs[0].name
    runners = {
        EAGER: eager(module, output),
        "torch.compile": torch_compiled(module, output),
        "ORT default": onnxruntime_default(work / MODEL_FILE, threads),
        "OpenVINO default": openvino_default(work / MODEL_FILE, threads),
        AUTO: auto,
    }
    return runners, published.manifest


def measure(runners: Mapping[str, Runner], case: Case, clock: Clock = time.perf_counter_ns) -> list[Row]:
    """Times the runners in turn and compares each one's answer with eager's; one that fails is told and left out."""
    answers, times = {}, {}
    for name, run in runners.items():
        try:
            answers[name] = run(case.inputs)  # torch.compile compiles here
        except Exception as error:
            print(f"  {name} does not run here: {' '.join(str(error).split())[:160]}")
        else:
            times[name] = [0.0] * ROUNDS
    for number in range(ROUNDS):
        for name in times:
            time.sleep(REST_S)
            times[name][number] = _block_ms(runners[name], case, clock)
    exact = Tolerance(atol=None, rtol=0.0, cosine=-1.0)
    rows = []
    for name, ms in times.items():
        found = [compare(case.name, o, want, answers[name][o], exact) for o, want in answers[EAGER].items()]
        rows.append(Row(name, tuple(ms), min(c.cosine for c in found)))
    return rows


def floors_of(rows: Sequence[Row], times_eager: float) -> list[Floor]:
    """Returns what `auto` must reach: the best peer's speed, a multiple of eager's, and agreement with eager."""
    by_name = {row.name: row for row in rows}
    auto, reference = by_name[AUTO], by_name[EAGER]
    best = min((row for row in rows if row.name != AUTO), key=lambda row: row.median_ms)
    return [
        Floor(f"auto to the best peer, {best.name}", MIN_OF_BEST_PEER, auto.ratio(best)),
        Floor("auto to eager", times_eager, auto.ratio(reference)),
        Floor("worst cosine of auto", MIN_COSINE, auto.cosine),
    ]


def table(rows: Sequence[Row], batch: int, flops: float) -> list[str]:
    """Returns the comparison as text; GFLOP/s shows what of the processor each one reaches."""
    eager_row = next(row for row in rows if row.name == EAGER)
    lines = [
        f"{'batch ' + str(batch):>18} {'ms':>8} {'to eager':>9} {'of the rounds':>14} {'cosine':>9} {'GFLOP/s':>8}"
    ]
    for row in rows:
        ratios = [a / b for a, b in zip(eager_row.ms, row.ms, strict=True)]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        lines.append(
            f"{row.name:>18} {row.median_ms:>8.2f} {row.ratio(eager_row):>8.2f}x {spread:>14} {row.cosine:>9.6f} "
            f"{flops / row.median_ms / 1e6:>8.0f}"
        )
    return lines


def candidate_lines(manifest: Mapping[str, Any]) -> list[str]:
    """Returns what auto tried, the fastest first."""
    lines = []
    for c in sorted(manifest["candidates"], key=lambda c: (bool(c["refused"]), c["latency_ms"] or 0.0)):
        name = f"{c['target']} {c['precision']}"
        shipped = (c["target"], c["precision"]) == (manifest["target"], manifest["precision"])
        cosine = f"{c['worst_cosine']:.6f}" if c["worst_cosine"] is not None else "-"
        said = "shipped" if shipped else c["refused"].split("\n")[0][:90]
        lines.append(f"  candidate {name:<26} {c['latency_ms'] or 0:>8.2f} ms  cosine {cosine}  {said}".rstrip())
    return lines


def _block_ms(run: Runner, case: Case, clock: Clock) -> float:
    times = []
    for _ in range(WARMUP + CALLS):
        started = clock()
        run(case.inputs)
        times.append((clock() - started) / 1e6)
    return statistics.median(times[WARMUP:])


def main() -> int:
    names = {contest.spec.stem: contest for contest in CONTESTS}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(names))
    parser.add_argument("--processor-time", action="store_true", help="one thread, its processor time")
    options = parser.parse_args()
    if unknown := sorted(set(options.models) - set(names)):
        parser.error(f"no model '{unknown[0]}'; models: {', '.join(names)}")
    contests = [names[name] for name in options.models] or CONTESTS
    if options.processor_time:
        return 0 if bench_auto(1, contests, time.process_time_ns) else 1
    return 0 if bench_auto(2, contests) else 1


if __name__ == "__main__":
    sys.exit(main())
