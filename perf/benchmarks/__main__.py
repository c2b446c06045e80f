"""Runs the benchmarks and prints one table each; builds the demo's models first where they are not built."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from perf.benchmarks.compiled_vs_eager import bench_compiled
from perf.benchmarks.served_vs_plain import bench_served
from perf.environment import describe_environment

REPOSITORY = Path("model_repository")
SPECS = Path(__file__).parents[2] / "ensembles" / "text_embedding"
THREADS = 2


def main() -> int:
    done = subprocess.run(
        [sys.executable, "-m", "compiler.cli", "build", str(SPECS), "-r", str(REPOSITORY)], check=False
    )
    if done.returncode:
        return done.returncode
    machine = describe_environment("127.0.0.1:0")
    print(f"\nMachine: {machine.cpu}, {machine.cores} cores; Python {platform.python_version()}; {THREADS} threads\n")
    bench_compiled(SPECS / "encoder.yaml", REPOSITORY / "minilm_encoder", THREADS)
    bench_served(SPECS, REPOSITORY, THREADS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
