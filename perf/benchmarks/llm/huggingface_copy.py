"""The same weights as a Hugging Face folder in bf16, for peers that read no GGUF.

python -m perf.benchmarks.llm.huggingface_copy MODEL.gguf FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ml_dtypes
from safetensors.numpy import save_file

from backends.llm.loaders import load_model
from backends.llm.models.weights import values
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.text_tokenizer import TextTokenizer
from compiler.errors import ModelRefused


def main(source: Path, folder: Path) -> int:
    model = load_model(source)
    c = model.config
    if c.architecture != "llama" or c.rope_scaling is not None:
        raise ModelRefused(f"{source} is {c.architecture}; only plain llama models are copied")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tie_word_embeddings,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    tensors = {name: values(weight).astype(ml_dtypes.bfloat16) for name, weight in model.weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = load_tokenizer(source)
    assert isinstance(tokenizer, TextTokenizer)
    tokenizer.save(folder / "tokenizer.json")
    stated = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(stated) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
