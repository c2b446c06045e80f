"""Ours, as a peer like the others."""

import sys
from pathlib import Path

from worker import serve


def load(model, threads):
    sys.path.insert(0, str(Path(__file__).parents[4]))
    from backends.llm import LLMEngine, SamplingParams

    engines = {}

    def engine(max_num_seqs):
        if max_num_seqs not in engines:
            for old in engines.values():
                old.close()
            engines.clear()
            engines[max_num_seqs] = LLMEngine.load(
                model,
                num_threads=threads,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=512,
                kv_cache_bytes=1 << 30,
                enable_prefix_cache=False,
            )
        return engines[max_num_seqs]

    def run(requests, max_num_seqs):
        params = [SamplingParams(max_tokens=r["max_tokens"], ignore_eos=True) for r in requests]
        results = engine(max_num_seqs).generate([r["token_ids"] for r in requests], params, progress=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    engine(32)
    return run


if __name__ == "__main__":
    serve("modelkiln", load)
