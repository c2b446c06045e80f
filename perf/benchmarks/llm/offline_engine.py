"""The engine alone, as a child process: what a served model is measured against.

python -m perf.benchmarks.llm.offline_engine VERSION_FOLDER
<- {"ready": true}
-> {"prompts": [[1, 2], ...], "max_tokens": 128}
<- {"seconds": 1.3, "output_tokens": 256, "ttft_ms": [12.1, ...]}
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from backends.llm import LLMEngine, SamplingParams


def main(folder: Path) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    engine = LLMEngine.load(folder)
    run(engine, [[1, 2, 3]], 2)
    _say(answers, {"ready": True})
    for line in sys.stdin:
        work = json.loads(line)
        _say(answers, run(engine, work["prompts"], work["max_tokens"]))
    return 0


def run(engine: LLMEngine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    """All prompts at once, step by step, as a served engine goes."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    first: dict[str, float] = {}
    tokens = 0
    while engine.has_requests:
        for output in engine.step():
            if output.delta.token_ids:
                first.setdefault(output.request_id, (time.perf_counter() - started) * 1e3)
                tokens += len(output.delta.token_ids)
    return {"seconds": time.perf_counter() - started, "output_tokens": tokens, "ttft_ms": list(first.values())}


def _say(stream: Any, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
