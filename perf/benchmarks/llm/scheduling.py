"""The scheduler without a model: time per step, memory over 100,000 requests, what the cache wastes."""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request
from backends.llm.engine.scheduler import Scheduler

MAX_NUM_SEQS, BLOCK_SIZE, NUM_BLOCKS = 64, 32, 4096


@dataclass
class Measured:
    """What a simulation found.

    Attributes:
        step_ms: processor time of each step with all places taken.
        waste: share of the slots in block tables that hold no token, at each such step.
        rss_mb: memory after each tenth of the requests.
    """

    step_ms: list[float] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    rss_mb: list[float] = field(default_factory=list)


def simulate(num_requests: int, mean_prompt: int, mean_output: int) -> Measured:
    """Runs requests of random lengths through the scheduler; every token sampled is the same."""
    rng = random.Random(0)
    kv_cache = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=2048, max_model_len=4096)
    scheduler = Scheduler(config, kv_cache)
    found = Measured()
    added = 0
    while added < num_requests or scheduler.has_requests:
        while added < num_requests and scheduler.num_waiting < MAX_NUM_SEQS:
            prompt = tuple(rng.randrange(50_000) for _ in range(rng.randint(1, 2 * mean_prompt - 1)))
            scheduler.add_request(Request(RequestId(str(added)), prompt, rng.randint(1, 2 * mean_output - 1)))
            added += 1
            if added % (num_requests // 10) == 0:
                found.rss_mb.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        started = time.thread_time_ns()
        output = scheduler.schedule()
        scheduled = time.thread_time_ns()
        sampled = {r.request_id: (7,) for r in output.requests if r.num_logits}
        sampled_at = time.thread_time_ns()
        scheduler.update_from_output(output, sampled)
        ended = time.thread_time_ns()
        if len(output.requests) == MAX_NUM_SEQS:
            found.step_ms.append((scheduled - started + ended - sampled_at) / 1e6)
            running = list(scheduler.running)
            slots = sum(kv_cache.num_blocks_of(r.request_id) for r in running) * BLOCK_SIZE
            found.waste.append(1 - sum(r.num_computed_tokens for r in running) / slots)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    found = simulate(arguments.requests, mean_prompt=32, mean_output=32)
    print(f"{arguments.requests} requests, {MAX_NUM_SEQS} running:")
    print(f"  a step takes {statistics.median(found.step_ms):.3f} ms of processor time (median)")
    print(f"  memory {found.rss_mb[0]:.1f} MB after a tenth, {found.rss_mb[-1]:.1f} MB at the end")
    found = simulate(2000, mean_prompt=256, mean_output=512)
    share = statistics.mean(found.waste)
    print(f"requests of 512 tokens in the mean while they run: {share:.2%} of the slots hold no token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
