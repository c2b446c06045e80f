"""transformers' generate() in bf16 on the dequantised weights: a padded static batch."""

from pathlib import Path

from worker import serve


def load(model, threads):
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    folder = Path(model).parent / "huggingface"
    decoder = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def run(requests, max_num_seqs):
        total = 0
        for first in range(0, len(requests), max_num_seqs):
            batch = requests[first : first + max_num_seqs]
            longest = max(len(r["token_ids"]) for r in batch)
            ids = torch.tensor([[0] * (longest - len(r["token_ids"])) + r["token_ids"] for r in batch])
            mask = torch.tensor([[0] * (longest - len(r["token_ids"])) + [1] * len(r["token_ids"]) for r in batch])
            count = max(r["max_tokens"] for r in batch)
            with torch.inference_mode():
                decoder.generate(
                    input_ids=ids, attention_mask=mask, min_new_tokens=count, max_new_tokens=count, do_sample=False
                )
            total += sum(r["max_tokens"] for r in batch)
        return total

    return run


if __name__ == "__main__":
    serve("transformers", load)
