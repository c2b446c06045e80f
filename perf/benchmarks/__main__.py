"""Runs the benchmarks and prints one table each; builds the demo's models first where they are not built.

The exit code is 1 where a promised floor was not met: the tables say which.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from compiler.precision.support import cpu_flags
from ensembles.text_embedding.chat import weights
from perf.benchmarks.auto_vs_peers import bench_auto
from perf.benchmarks.compile_cost import ENCODER, bench_compile_cost
from perf.benchmarks.compiled_vs_eager import bench_compiled
from perf.benchmarks.llm.served import main as bench_llm_served
from perf.benchmarks.served_vs_plain import bench_served
from perf.environment import describe_environment

REPOSITORY = Path("model_repository")
SPECS = Path(__file__).parents[2] / "ensembles" / "text_embedding"
THREADS = 2
# Instructions that decide which form is fastest, as Linux names them.
FAST = frozenset({"avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_bf16", "amx_int8"})


def main() -> int:
    done = subprocess.run(
        [sys.executable, "-m", "compiler.cli", "build", str(SPECS), "-r", str(REPOSITORY)], check=False
    )
    if done.returncode:
        return done.returncode
    machine = describe_environment("127.0.0.1:0")
    print(f"\nMachine: {machine.cpu}, {machine.cores} cores; Python {platform.python_version()}; {THREADS} threads")
    # What other work on the machine does to every figure below.
    print(
        f"Load average {os.getloadavg()[0]:.1f}; the CPU has {', '.join(sorted(FAST & cpu_flags())) or 'no AVX-512'}\n"
    )
    met = [bench_compile_cost(ENCODER), bench_auto(THREADS)]
    bench_compiled(SPECS / "encoder.yaml", REPOSITORY / "minilm_encoder", THREADS)
    bench_served(SPECS, REPOSITORY, THREADS)
    met.append(bench_llm_served([str(weights()), "--threads", str(THREADS)]) == 0)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
