"""SamplingParams: each field's range, the message, and what JSON may hold."""

from __future__ import annotations

import json
import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llm.errors import InvalidRequest
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.params_json import params_from_json

REFUSED: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 129),
    ("n", 1.0),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("temperature", "warm"),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("seed", 2**63),
    ("seed", 0.5),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 17),  # above the default max_tokens
    ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21),
    ("ignore_eos", 1),
    ("skip_special_tokens", None),
    ("include_stop_str_in_output", "yes"),
    ("stop", ("",)),
    ("stop", ("x",) * 17),
    ("stop", ("x" * 257,)),
    ("stop", (1,)),
    ("stop", 5),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", (1.0,)),
    ("stop_token_ids", "12"),
    ("stop_token_ids", tuple(range(129))),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1, 2]),
]

ACCEPTED: list[tuple[str, Any]] = [
    ("n", 128),
    ("temperature", 0),
    ("temperature", 100.0),
    ("top_k", -1),
    ("top_k", 10**9),
    ("top_p", 1),
    ("top_p", 1e-6),
    ("min_p", 1.0),
    ("repetition_penalty", 0.01),
    ("presence_penalty", -2),
    ("frequency_penalty", 2.0),
    ("seed", -(2**63)),
    ("max_tokens", None),
    ("min_tokens", 16),
    ("logprobs", 20),
    ("prompt_logprobs", 0),
    ("stop", ("x" * 256,) * 16),
    ("stop_token_ids", (0,)),
    ("logit_bias", {0: -100, 5: 100.0}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_refusal_names_field_value_and_what_is_allowed(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} is ")
    assert "; allowed: " in caught.value.message


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_the_ends_of_the_ranges_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_the_message_in_full() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(top_p=1.5)
    assert caught.value.message == "top_p is 1.5; allowed: a number above 0, up to 1"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(temperature=-1.0)
    assert caught.value.message == "temperature is -1.0; allowed: a number of 0 or more"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(min_p=2.0)
    assert caught.value.message == "min_p is 2.0; allowed: a number of 0 or more, up to 1"
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(n=0)
    assert caught.value.message == "n is 0; allowed: an integer from 1 to 128"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(stop=("y" * 100_000,))
    assert len(caught.value.message) < 200


def test_one_stop_string_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3])  # type: ignore[arg-type]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3,)


def test_later_changes_of_a_callers_dict_do_not_arrive() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1e9
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_must_be_in_the_vocabulary(field: str) -> None:
    value: Any = {10: 1.0} if field == "logit_bias" else (10,)
    params = SamplingParams(**{field: value})
    params.check_vocabulary(11)
    with pytest.raises(InvalidRequest, match="is 10; allowed: token ids from 0 to 9") as caught:
        params.check_vocabulary(10)
    assert caught.value.param == field


def test_json_as_tritons_vllm_clients_send_it() -> None:
    data = json.loads(
        '{"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "ignore_eos": "True", "stop": null}'
    )
    assert params_from_json(data) == SamplingParams(temperature=0.1, top_p=0.95, max_tokens=100, ignore_eos=True)


def test_json_has_text_for_the_keys_of_logit_bias() -> None:
    data = json.loads('{"logit_bias": {"50256": -100, "3": 1.5}, "stop": ["a", "b"]}')
    assert params_from_json(data) == SamplingParams(logit_bias={50256: -100, 3: 1.5}, stop=("a", "b"))


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"temperature": "warm"}', "temperature"),
        ('{"max_tokens": "1.5"}', "max_tokens"),
        ('{"max_tokens": 1.5}', "max_tokens"),
        ('{"temperature": "nan"}', "temperature"),
        ('{"temperature": NaN}', "temperature"),
        ('{"ignore_eos": "maybe"}', "ignore_eos"),
        ('{"logit_bias": {"a": 1}}', "logit_bias"),
        ('{"logprobs": true}', "logprobs"),
        ('{"stop": {"a": 1}}', "stop"),
        ('{"temperatur": 1}', "temperatur"),
    ],
)
def test_json_that_is_refused(text: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params_from_json(json.loads(text))
    assert caught.value.param == param


def test_an_unknown_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InvalidRequest, match=r"'temperatur' is no sampling parameter \(did you mean 'temperature'\?\)"):
        params_from_json({"temperatur": 1})


def test_unknown_keys_are_ignored_and_logged_where_the_openai_api_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert params_from_json({"user": "me", "top_k": 5}, ignore_unknown=True) == SamplingParams(top_k=5)
    assert caplog.messages == ["ignored unknown sampling parameters: user"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)) | st.text(max_size=3), JSON))
def test_any_json_gives_params_or_the_typed_error(data: dict[str, Any]) -> None:
    try:
        params = params_from_json(data)
    except InvalidRequest as error:
        assert error.param in {*SamplingParams.__dataclass_fields__, *data}
    else:
        assert params_from_json({"n": params.n}).n == params.n


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("max_tokens", np.int64(3), 3),
        ("seed", np.uint8(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("top_p", np.float64(0.5), 0.5),
        ("min_p", np.int32(1), 1),
        ("ignore_eos", np.bool_(True), True),
        ("stop_token_ids", np.array([1, 2]), (1, 2)),
        ("logit_bias", {np.int64(1): np.float32(2)}, {1: 2.0}),
        ("stop", None, ()),
        ("stop_token_ids", None, ()),
        ("logit_bias", None, {}),
    ],
)
def test_numbers_of_numpy_become_pythons_own(name: str, value: Any, plain: Any) -> None:
    got = getattr(SamplingParams(**{name: value}), name)
    assert got == plain and type(got) is type(plain)


def test_parameters_and_their_errors_go_through_pickles_and_sets() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2}, structured_outputs={"regex": "a+"})  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(params)) == params and len({params, SamplingParams(), SamplingParams()}) == 2
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(n=0)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is InvalidRequest and (again.param, str(again)) == ("n", str(caught.value))
