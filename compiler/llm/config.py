"""config.pbtxt of a model for the `llm` backend: the tensors of docs/serving_llm.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.spec import Serving
from compiler.triton_config import TensorConfig, add_serving, base_config

BACKEND = "llm"
# name -> (type, dims); every input is optional: exactly one of the first two is needed, and Triton cannot say that.
INPUTS = {
    "text_input": ("TYPE_STRING", (1,)),
    "input_ids": ("TYPE_INT32", (-1,)),
    "stream": ("TYPE_BOOL", (1,)),
    "sampling_parameters": ("TYPE_STRING", (1,)),
    "max_tokens": ("TYPE_INT32", (1,)),
    "temperature": ("TYPE_FP32", (1,)),
    "top_p": ("TYPE_FP32", (1,)),
    "top_k": ("TYPE_INT32", (1,)),
    "seed": ("TYPE_INT64", (1,)),
    "stop": ("TYPE_STRING", (-1,)),
    "logprobs": ("TYPE_INT32", (1,)),
    "priority": ("TYPE_INT32", (1,)),
    "deadline_ms": ("TYPE_FP32", (1,)),
    "client": ("TYPE_STRING", (1,)),
    "cache_salt": ("TYPE_STRING", (1,)),
    "cancel_id": ("TYPE_STRING", (1,)),
    "cancel": ("TYPE_STRING", (1,)),
    "exclude_input_in_output": ("TYPE_BOOL", (1,)),
    "return_finish_reason": ("TYPE_BOOL", (1,)),
    "return_cumulative_logprob": ("TYPE_BOOL", (1,)),
    "return_logprobs": ("TYPE_BOOL", (1,)),
    "return_num_input_tokens": ("TYPE_BOOL", (1,)),
    "return_num_output_tokens": ("TYPE_BOOL", (1,)),
    "return_num_cached_tokens": ("TYPE_BOOL", (1,)),
    "return_token_ids": ("TYPE_BOOL", (1,)),
    "return_usage": ("TYPE_BOOL", (1,)),
}
# One value for each of a request's n answers, but for the ids and the prompt's log probabilities.
OUTPUTS = {
    "text_output": "TYPE_STRING",
    "finish_reason": "TYPE_STRING",
    "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING",
    "num_input_tokens": "TYPE_UINT32",
    "num_output_tokens": "TYPE_UINT32",
    "num_cached_tokens": "TYPE_UINT32",
    "token_ids": "TYPE_INT32",
    "usage": "TYPE_STRING",
    "prompt_logprobs": "TYPE_STRING",
}


def llm_config(name: str, kind: str, parameters: Mapping[str, str] | None = None) -> Any:
    """Returns the ModelConfig: decoupled, since an answer comes in many responses; one instance, which batches.

    Args:
        parameters: see ServiceOptions.
    """
    config = base_config(
        name,
        BACKEND,
        0,
        [TensorConfig(tensor, triton_type, dims) for tensor, (triton_type, dims) in INPUTS.items()],
        [TensorConfig(tensor, triton_type, (-1,)) for tensor, triton_type in OUTPUTS.items()],
    )
    for tensor in config.input:
        tensor.optional = True
    config.model_transaction_policy.decoupled = True
    add_serving(config, Serving(), parameters or {}, kind)
    return config
