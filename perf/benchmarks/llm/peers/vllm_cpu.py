"""vLLM on the CPU, from a Hugging Face folder with the same weights in bf16."""

import os
import sys
from pathlib import Path

from worker import serve


def load(model, threads):
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    import vllm

    engine = vllm.LLM(
        str(Path(model).parent / "huggingface"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
    )

    def run(requests, max_num_seqs):
        params = [
            vllm.SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True, detokenize=False)
            for r in requests
        ]
        prompts = [{"prompt_token_ids": r["token_ids"]} for r in requests]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return run


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve("vLLM CPU", load)
