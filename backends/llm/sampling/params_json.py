"""SamplingParams from the JSON of a request: text for numbers and null for "not given", as clients send them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from backends.llm.errors import InvalidRequest
from backends.llm.sampling.params import SamplingParams
from compiler.errors import did_you_mean, one_of

log = logging.getLogger(__name__)

_FIELDS = tuple(f.name for f in dataclasses.fields(SamplingParams))
_FLOATS = frozenset(
    {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"},
)
_INTEGERS = frozenset({"n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"})
_BOOLEANS = frozenset({"ignore_eos", "include_stop_str_in_output", "skip_special_tokens"})


def params_from_json(data: Mapping[str, Any], *, ignore_unknown: bool = False) -> SamplingParams:
    """Reads a JSON object whose keys are the fields of SamplingParams.

    Numbers and booleans may be strings, as Triton's own vLLM clients send them; null stands for the default; the
    keys of `logit_bias` are strings, as JSON has no others.

    Args:
        data: the parsed object.
        ignore_unknown: log keys that are no field instead of refusing them, as the OpenAI API wants it.

    Raises:
        InvalidRequest: a key is unknown, or a value is not allowed.
    """
    unknown = sorted(str(key) for key in data if key not in _FIELDS)
    if unknown and ignore_unknown:
        log.warning("ignored unknown sampling parameters: %s", ", ".join(unknown)[:200])
    elif unknown:
        close = did_you_mean(unknown[0], _FIELDS)
        raise InvalidRequest(
            f"'{unknown[0][:80]}' is no sampling parameter{close}; allowed: {one_of(_FIELDS)}", param=unknown[0][:80]
        )
    values = {name: _value(name, data[name]) for name in _FIELDS if data.get(name) is not None}
    return SamplingParams(**values)


def _value(name: str, value: Any) -> Any:
    """Returns a value with text turned into what the field wants; what cannot be turned is left to be refused."""
    if name == "logit_bias" and isinstance(value, Mapping):
        return {_number(token_id, int): bias for token_id, bias in value.items()}
    if name in _FLOATS:
        return _number(value, float)
    if name in _INTEGERS:
        return _number(value, int)
    if name in _BOOLEANS and isinstance(value, str):
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    if not isinstance(value, str) or len(value) > 40:
        return value
    try:
        return kind(value)
    except ValueError:
        return value
