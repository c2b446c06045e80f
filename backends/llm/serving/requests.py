"""A request's tensors as what the engine takes. Pure; the tensors of docs/serving_llm.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.llm.errors import InvalidRequest, prompt_too_long
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.params_json import params_from_json

Tensors = Mapping[str, npt.NDArray[Any]]

# Inputs that are sampling parameters by the same name.
TYPED_PARAMETERS = ("max_tokens", "top_k", "logprobs", "temperature", "top_p", "seed", "stop")
# Input -> the output that comes with it.
RETURN_INPUTS = {
    f"return_{name}": name
    for name in (
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "token_ids",
        "usage",
    )
}


@dataclass(frozen=True)
class ServedRequest:
    """What a client asks for.

    Attributes:
        prompt: a text, or token ids as they are.
        prompt_input: the name of the input that it came in.
        stream: a response for each step, not one in the end.
        prefix: what the text of the answer begins with: the prompt, where it is wanted.
        outputs: beside `text_output`.
        cancel_id: by which it can be cancelled.
        priority, client, cache_salt, deadline_ms: see LLMEngine.add_request.
    """

    prompt: str | tuple[int, ...]
    prompt_input: str
    params: SamplingParams
    stream: bool
    prefix: str
    outputs: frozenset[str]
    cancel_id: str = ""
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    deadline_ms: float | None = None


def request_from_tensors(
    tensors: Tensors,
    *,
    max_model_len: int,
    parameters: str = "",
    timeout_us: int = 0,
    default_deadline_ms: float | None = None,
) -> ServedRequest:
    """Reads a request.

    Args:
        tensors: the inputs that it has; strings are objects of bytes, as Triton hands them over.
        max_model_len: tokens of a prompt and its answer together; many more are refused here, before they are copied.
        parameters: the request's own parameters as JSON, which stand for `sampling_parameters` where that is absent:
            this is where `/generate` puts what is no input. Unknown ones are ignored, since they may be for others.
        timeout_us: Triton's request timeout, 0 for none; the earliest deadline counts.
        default_deadline_ms: where the request has no deadline.

    Raises:
        InvalidRequest: with the name of the input or of the sampling parameter.
        RequestRefused: `input_ids` can never fit.
    """
    stream = _flag(tensors, "stream")
    prompt_input, prompt = _prompt(tensors, max_model_len)
    outputs = frozenset(output for name, output in RETURN_INPUTS.items() if _flag(tensors, name))
    params = _params(tensors, parameters, outputs)
    if params.prompt_logprobs is not None:
        outputs |= {"prompt_logprobs"}
    if "token_ids" in outputs and params.n > 1:
        raise InvalidRequest(f"return_token_ids is true and n is {params.n}; allowed: n of 1", param="return_token_ids")
    return ServedRequest(
        prompt=prompt,
        prompt_input=prompt_input,
        params=params,
        stream=stream,
        prefix=prompt if _echoes(tensors, stream) and isinstance(prompt, str) else "",
        outputs=outputs,
        cancel_id=_text(tensors, "cancel_id"),
        priority=int(_first(tensors, "priority", 0)),
        client=_text(tensors, "client"),
        cache_salt=_text(tensors, "cache_salt"),
        deadline_ms=_deadline_ms(tensors, timeout_us, default_deadline_ms),
    )


def cancel_from_tensors(tensors: Tensors) -> str | None:
    """Returns the `cancel_id` of the request that this one cancels; None where this one is for an answer.

    Raises:
        InvalidRequest: it names none, or has a prompt of its own.
    """
    if "cancel" not in tensors:
        return None
    if "text_input" in tensors or "input_ids" in tensors:
        raise InvalidRequest("cancel is given beside a prompt; allowed: one of them", param="cancel")
    cancel_id = _text(tensors, "cancel")
    if not cancel_id:
        raise InvalidRequest("cancel is empty; allowed: the cancel_id of a request", param="cancel")
    return cancel_id


def _prompt(tensors: Tensors, max_model_len: int) -> tuple[str, str | tuple[int, ...]]:
    given = [name for name in ("text_input", "input_ids") if name in tensors]
    if len(given) != 1:
        raise InvalidRequest(
            f"{'both text_input and input_ids are' if given else 'neither text_input nor input_ids is'} given; "
            "allowed: one of them",
            param="text_input",
        )
    if given == ["text_input"]:
        return "text_input", _text(tensors, "text_input")
    num_tokens = tensors["input_ids"].size
    if num_tokens >= max_model_len:
        raise prompt_too_long(num_tokens, max_model_len)
    return "input_ids", tuple(tensors["input_ids"].reshape(-1).tolist())


def _params(tensors: Tensors, parameters: str, outputs: frozenset[str]) -> SamplingParams:
    given = "sampling_parameters" in tensors
    text = _text(tensors, "sampling_parameters") if given else parameters
    values = _json_object(text) if text else {}
    for name in TYPED_PARAMETERS:
        if name in tensors:
            values[name] = _typed(name, tensors[name])
    params = params_from_json(values, ignore_unknown=not given)
    if params.logprobs is None and outputs & {"logprobs", "cumulative_logprob"}:
        return replace(params, logprobs=0)
    return params


def _json_object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidRequest(f"sampling_parameters is not valid JSON: {why}", param="sampling_parameters") from None
    if not isinstance(values, dict):
        raise InvalidRequest(
            f"sampling_parameters is a JSON {type(values).__name__}; allowed: an object", param="sampling_parameters"
        )
    return values


def _typed(name: str, tensor: npt.NDArray[Any]) -> Any:
    if name == "stop":
        return [_decoded(value, name) for value in tensor.reshape(-1)]
    value = _single(name, tensor)
    # 0.7 in float32 is 0.699999988 as a Python float: the shortest decimal gives what JSON would have given.
    return float(str(value)) if tensor.dtype == np.float32 else value.item()


def _deadline_ms(tensors: Tensors, timeout_us: int, default_ms: float | None) -> float | None:
    deadlines = [timeout_us / 1e3] if timeout_us > 0 else []
    if "deadline_ms" in tensors:
        deadline_ms = float(_single("deadline_ms", tensors["deadline_ms"]))
        if not 0 < deadline_ms <= 1e12:  # NaN fails too
            raise InvalidRequest(f"deadline_ms is {deadline_ms}; allowed: a number above 0", param="deadline_ms")
        deadlines.append(deadline_ms)
    return min(deadlines, default=default_ms)


def _echoes(tensors: Tensors, stream: bool) -> bool:
    """Whether the answer begins with the prompt; in a stream it never does, as in Triton's vLLM backend."""
    excluded = _flag(tensors, "exclude_input_in_output")
    if stream and "exclude_input_in_output" in tensors and not excluded:
        raise InvalidRequest(
            "exclude_input_in_output is false and stream is true; allowed: true, or leave it out",
            param="exclude_input_in_output",
        )
    return not stream and not excluded


def _flag(tensors: Tensors, name: str) -> bool:
    return bool(_first(tensors, name, False))


def _text(tensors: Tensors, name: str) -> str:
    return _decoded(_first(tensors, name, b""), name)


def _first(tensors: Tensors, name: str, default: Any) -> Any:
    return _single(name, tensors[name]) if name in tensors else default


def _single(name: str, tensor: npt.NDArray[Any]) -> Any:
    if tensor.size != 1:
        raise InvalidRequest(f"{name} has the shape {list(tensor.shape)}; allowed: [1]", param=name)
    return tensor.reshape(-1)[0]


def _decoded(value: bytes | str, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 at byte {error.start}", param=name) from None
