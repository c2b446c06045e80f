"""What sampling costs in one step: 32 rows of a vocabulary of 49,152, against the argmax that greedy decoding needs.

    python -m perf.benchmarks.llm.sampling [logits.npy]

Without a file the rows are random with a few likely tokens each. The calls of all kinds run in turn; the times are of
the thread's processor, so that other jobs on the machine count little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.sampler import SampleRequest, sample
from backends.llm.sampling.state import SamplerState

ROWS, VOCAB_SIZE, ROUNDS = 32, 49_152, 40

KINDS = {
    "greedy": SamplingParams(),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "temperature 2, top-p 0.95": SamplingParams(temperature=2.0, top_p=0.95),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "top-k 50, top-p 0.95": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "greedy, repetition penalty": SamplingParams(repetition_penalty=1.1),
    "greedy, 5 logprobs": SamplingParams(logprobs=5),
}


def random_logits() -> npt.NDArray[np.float32]:
    """Returns [ROWS, VOCAB_SIZE] in the manner of a language model: most tokens far below a few."""
    rng = np.random.default_rng(0)
    logits = 4 * rng.normal(size=(ROWS, VOCAB_SIZE)) - 5
    for row in logits:
        row[rng.integers(0, VOCAB_SIZE, 30)] += 20 * rng.random(30)
    return logits.astype(np.float32)


def main(arguments: Sequence[str]) -> int:
    logits = np.ascontiguousarray(np.load(arguments[0])) if arguments else random_logits()
    calls: dict[str, Callable[[], object]] = {"argmax": lambda: logits.argmax(axis=1)}
    for name, params in KINDS.items():
        states = [SamplerState(params, range(500), seed=seed) for seed in range(len(logits))]
        requests = [SampleRequest(state) for state in states]
        calls[name] = lambda requests=requests: sample(logits, requests)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            times[name].append((time.thread_time() - begin) * 1e3)
    least = statistics.median(times["argmax"])
    print(f"| {len(logits)} rows of {logits.shape[1]} | ms a step | of the argmax |\n|---|---|---|")
    for name, values in times.items():
        print(f"| {name} | {statistics.median(values):.2f} | {statistics.median(values) / least:.1f}x |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
