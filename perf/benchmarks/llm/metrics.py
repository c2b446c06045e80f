"""What metrics cost the engine: the time of their counting as a share of the time of its steps, in one run.

Sending them is not in it: that is another thread's, and at most MAX_SHARE of the time.

python -m perf.benchmarks.llm.metrics MODEL.gguf
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from backends.llm import SamplingParams
from backends.llm.serving.metrics import EngineMetrics
from backends.llm.serving.metrics_publisher import MAX_SHARE
from perf.benchmarks.llm.features import Model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    arguments = parser.parse_args()
    model = Model(arguments.model)
    for num_streams in (1, 8, 32):
        bench(model, num_streams, arguments.tokens)
    return 0


def bench(model: Model, num_streams: int, num_tokens: int) -> None:
    """Prints what a step takes with all streams under way, and what counting it takes."""
    engine = model.engine()
    metrics = EngineMetrics(engine.scheduler.max_model_len, engine.stats())
    chance = random.Random(num_streams)
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    for number in range(num_streams):
        engine.add_request(str(number), [chance.randrange(3, 1000) for _ in range(32)], params)
        metrics.added(str(number), params, time.monotonic_ns())
    steps = counting = 0.0
    num_steps = 0
    while engine.has_requests:
        started = time.perf_counter()
        outputs = engine.step()
        stepped = time.perf_counter()
        metrics.stepped(outputs, engine.stats(), time.monotonic_ns())
        counted = time.perf_counter()
        steps += stepped - started
        counting += counted - stepped
        num_steps += 1
    started = time.perf_counter()
    numbers = metrics.snapshot()
    snapshot_s = time.perf_counter() - started
    print(
        f"{num_streams:>2} streams: a step {steps / num_steps * 1e3:.2f} ms, counting it "
        f"{counting / num_steps * 1e6:.0f} us, {counting / steps:.2%}; a snapshot of {len(numbers)} numbers "
        f"{snapshot_s * 1e6:.0f} us; sending them at most {MAX_SHARE:.1%} of the time"
    )


if __name__ == "__main__":
    sys.exit(main())
