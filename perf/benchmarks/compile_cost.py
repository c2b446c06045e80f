"""What a build from cold costs: seconds by stage and the largest resident memory, in a process of its own.

python -m perf.benchmarks.compile_cost [SPEC [compile build's options]]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.errors import PerfError

ENCODER = Path(__file__).parents[2] / "ensembles" / "text_embedding" / "encoder.yaml"
MAX_SECONDS = 60.0
# Peak memory: four times the weights, and 1 GB for Python, torch and the runtimes.
MAX_TIMES_WEIGHTS, MAX_BESIDE_BYTES = 4, 1 << 30


@dataclass(frozen=True)
class Cost:
    """A cold build.

    Attributes:
        cpu_seconds: of all threads; what a busy machine does not lengthen.
        stages: seconds by stage.
        peak_bytes: the largest resident memory of the process.
        weight_bytes: of the model's fp32 weights.
    """

    seconds: float
    cpu_seconds: float
    stages: dict[str, float]
    peak_bytes: int
    weight_bytes: int

    @property
    def max_bytes(self) -> int:
        return MAX_TIMES_WEIGHTS * self.weight_bytes + MAX_BESIDE_BYTES


# The child reports for itself: the peak of all children together is not one build's.
_CHILD = """
import resource, sys
from compiler.cli import main
try:
    main(sys.argv[1:])
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"used={used.ru_maxrss} {used.ru_utime + used.ru_stime}", file=sys.stderr)
"""


def cold_build(spec: Path, flags: Sequence[str] = ()) -> Cost:
    """Builds the spec into an empty repository without the cache, and measures it.

    Raises:
        PerfError: the build failed; its last words are told.
    """
    with tempfile.TemporaryDirectory(prefix="modelkiln-bench-") as work:
        command = ["build", str(spec), "-r", work, "--no-cache", "--json", *flags]
        done = subprocess.run([sys.executable, "-c", _CHILD, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PerfError(f"`compile {' '.join(command)}` failed: {done.stderr[-400:]}")
    result = json.loads(done.stdout)["models"][0]
    used = next(line for line in done.stderr.splitlines() if line.startswith("used="))
    peak_kib, cpu_seconds = used.removeprefix("used=").split()
    return Cost(
        seconds=result["seconds"],
        cpu_seconds=float(cpu_seconds),
        stages={stage["name"]: stage["seconds"] for stage in result["stages"]},
        peak_bytes=int(peak_kib) << 10,
        weight_bytes=4 * result["manifest"]["parameters"],
    )


def bench_compile_cost(spec: Path, flags: Sequence[str] = ()) -> bool:
    """Prints a build's seconds by stage and its peak memory; returns whether both limits are kept."""
    cost = cold_build(spec, flags)
    print(f"compile build {spec.name} {' '.join(flags)}, from cold:")
    for name, seconds in cost.stages.items():
        print(f"{name:>28} {seconds:>7.1f} s")
    kept = cost.seconds < MAX_SECONDS, cost.peak_bytes < cost.max_bytes
    words = ["PASS" if ok else "FAIL" for ok in kept]
    print(f"{'processor time':>28} {cost.cpu_seconds:>7.1f} s")
    print(f"{'in all':>28} {cost.seconds:>7.1f} s   {words[0]}: at most {MAX_SECONDS:g} s")
    print(
        f"{'peak memory':>28} {cost.peak_bytes / 1e6:>7.0f} MB  {words[1]}: at most {cost.max_bytes / 1e6:.0f} MB, "
        f"four times the {cost.weight_bytes / 1e6:.0f} MB of weights and 1 GiB\n"
    )
    return all(kept)


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(0 if bench_compile_cost(Path(given[0]) if given else ENCODER, given[1:]) else 1)
