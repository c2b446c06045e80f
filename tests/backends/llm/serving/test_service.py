"""A served toy model: tensors in, tensors out, over both threads; cancels, refusals, failures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from backends.llm.sampling.params import SamplingParams
from backends.llm.serving.errors import CANCELLED
from backends.llm.serving.options import ServiceOptions, check_instances
from backends.llm.serving.service import Service
from compiler.errors import UsageError
from tests.backends.llm.engine.test_engine import ToyTokenizer, letters, make_engine
from tests.backends.llm.engine.toy import plain_answer
from tests.backends.llm.serving.channels import RecordingChannel
from tests.backends.llm.serving.test_requests import tensors


@pytest.fixture
def make_service():
    made = []

    def make(options=None, engine=None, **config):
        made.append(Service(engine or make_engine(**config), options or ServiceOptions()))
        return made[-1]

    yield make
    for service in made:
        service.close()


def ask(service, channel=None, **values):
    channel = channel or RecordingChannel()
    values = {"sampling_parameters": '{"ignore_eos": true}', "exclude_input_in_output": True, **values}
    service.submit(channel, tensors(**values))
    return channel


def answer(text, num_tokens):
    return letters(plain_answer(ToyTokenizer().encode(text), num_tokens))


def test_one_response_with_the_whole_text(make_service):
    channel = ask(make_service(), text_input="hello", max_tokens=9).wait()
    assert len(channel.responses) == 1 and channel.text == answer("hello", 9) and not channel.errors


def test_a_stream_has_a_response_for_each_token_and_the_last_is_the_final_one(make_service):
    channel = ask(make_service(), text_input="hello", max_tokens=9, stream=True, return_finish_reason=True).wait()
    assert len(channel.responses) == 9 and channel.text == answer("hello", 9)
    assert [r["finish_reason"][0] for r in channel.responses] == [b"None"] * 8 + [b"length"]


def test_many_requests_from_many_threads_each_get_their_own(make_service):
    service = make_service()
    channels = {}

    def send(first):
        for i in range(first, first + 8):
            text = letters([i, 3 * i, 7])
            channels[i] = (text, ask(service, text_input=text, max_tokens=4 + i % 5, stream=i % 2 == 0))

    threads = [threading.Thread(target=send, args=(8 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (text, channel) in channels.items():
        assert channel.wait().text == answer(text, 4 + i % 5) and not channel.errors


def test_what_is_asked_for_comes_and_nothing_else(make_service):
    service = make_service()
    plain = ask(service, text_input="hello", max_tokens=3).wait()
    assert set(plain.responses[0]) == {"text_output"}  # g35: no log probabilities that nobody wants
    names = (
        "finish_reason",
        "cumulative_logprob",
        "logprobs",
        "num_input_tokens",
        "num_output_tokens",
        "num_cached_tokens",
        "token_ids",
    )
    full = ask(service, text_input="hello", max_tokens=3, logprobs=1, **{f"return_{n}": True for n in names}).wait()
    (response,) = full.responses
    ids = plain_answer(ToyTokenizer().encode("hello"), 3)
    assert set(response) == {"text_output", *names}
    assert response["token_ids"].tolist() == ids and response["token_ids"].dtype == np.int32
    assert [response[n].tolist() for n in names[3:6]] == [[5], [3], [4]]  # one block of 4 was cached
    entries = json.loads(response["logprobs"][0])
    assert [next(iter(e)) for e in entries] == [str(i) for i in ids]
    # The toy's logits are 1 for its token and 0 for the 96 others: log(e / (e + 96)).
    logprob = float(np.log(np.e / (np.e + 96)))
    chosen = entries[0][str(ids[0])]
    assert chosen["logprob"] == pytest.approx(logprob) and chosen["rank"] == 1
    assert chosen["decoded_token"] == letters([ids[0]]) and chosen["bytes"] == [ord(letters([ids[0]]))]
    assert response["cumulative_logprob"][0] == pytest.approx(3 * logprob)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_prompt_come_with_the_last_response(make_service, stream):
    plain = make_engine()
    params = SamplingParams(max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    (expected,) = plain.generate(["hello"], params, progress=False)
    service = make_service()
    ask(service, text_input="hello", max_tokens=1).wait()  # what is cached has no logits
    parameters = '{"prompt_logprobs": 2, "ignore_eos": true}'
    asked = ask(service, text_input="hello", max_tokens=4, stream=stream, sampling_parameters=parameters).wait()
    *before, last = asked.responses
    assert len(before) == (3 if stream else 0) and all("prompt_logprobs" not in response for response in before)
    (text,) = last["prompt_logprobs"]
    found = [[(int(i), t["logprob"]) for i, t in entry.items()] for entry in json.loads(text)]
    assert [entry[0][0] for entry in found] == list(expected.prompt_token_ids[1:])
    for entry, wanted in zip(found, expected.prompt_logprobs, strict=True):
        assert dict(entry) == pytest.approx({wanted.token_id: wanted.logprob} | dict(wanted.top), abs=1e-5)


def test_usage_comes_with_the_end_of_an_answer_alone(make_service):
    service = make_service()
    asked = {"text_input": "hello", "max_tokens": 6, "return_usage": True}
    (whole,) = ask(service, **asked).wait().responses
    usage = {"finish_reason": "length", "prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 0}
    assert set(whole) == {"text_output", "usage"} and [json.loads(u) for u in whole["usage"]] == [usage]
    *going_on, last = ask(service, stream=True, **asked).wait().responses
    assert len(going_on) == 5 and all(set(response) == {"text_output"} for response in going_on)
    assert [json.loads(u) for u in last["usage"]] == [{**usage, "cached_tokens": 4}]  # one block of 4 was cached


def test_usage_of_n_answers_comes_when_each_ends(make_service):
    parameters = '{"n": 3, "seed": 1, "temperature": 5, "ignore_eos": true, "stop": ["a", "e", "i"]}'
    asked = {"text_input": "hello", "max_tokens": 60, "return_usage": True, "return_num_output_tokens": True}
    responses = ask(make_service(), stream=True, sampling_parameters=parameters, **asked).wait().responses
    ended = [[bool(u) for u in response["usage"]] for response in responses if "usage" in response]
    assert len(ended) > 1 and [sum(column) for column in zip(*ended, strict=True)] == [1, 1, 1]
    for answer in range(3):
        told = sum(int(response["num_output_tokens"][answer]) for response in responses)
        (usage,) = [json.loads(r["usage"][answer]) for r in responses if "usage" in r and r["usage"][answer]]
        assert usage["finish_reason"] == "stop" and usage["completion_tokens"] == told


def test_n_answers_come_side_by_side(make_service):
    parameters = '{"ignore_eos": true, "n": 3, "seed": 1, "temperature": 5}'
    values = {"text_input": "hello", "max_tokens": 6, "sampling_parameters": parameters, "return_finish_reason": True}
    service = make_service()
    (whole,) = ask(service, **values).wait().responses
    streamed = ask(service, stream=True, **values).wait().responses
    assert all(r["text_output"].shape == r["finish_reason"].shape == (3,) for r in [whole, *streamed])
    for index in range(3):
        assert b"".join(r["text_output"][index] for r in streamed) == whole["text_output"][index]
    assert len(set(whole["text_output"])) == 3 and list(whole["finish_reason"]) == [b"length"] * 3
    assert list(streamed[-1]["finish_reason"]) == [b"length"] * 3


def test_g13_g14_a_stop_string_never_leaks_and_the_pieces_are_the_whole(make_service):
    service = make_service()
    text = answer("hello", 12)
    values = {"text_input": "hello", "max_tokens": 12, "stop": [text[4:7]], "return_finish_reason": True}
    streamed = ask(service, stream=True, **values).wait()
    assert streamed.text == ask(service, **values).wait().text == text[: text.index(text[4:7])]
    assert streamed.responses[-1]["finish_reason"][0] == b"stop"


def test_the_prompt_comes_first_where_it_is_wanted(make_service):
    channel = RecordingChannel()
    make_service().submit(
        channel, tensors(text_input="hello", max_tokens=3, sampling_parameters='{"ignore_eos": true}')
    )
    assert channel.wait().text == "hello" + answer("hello", 3)


def test_one_requests_error_is_its_own(make_service):
    service = make_service()
    good = [ask(service, text_input="hello", max_tokens=20, stream=True) for _ in range(3)]
    bad = [
        (ask(service, text_input="hello", temperature=-1.0), "[invalid_request:temperature] temperature is -1.0"),
        (ask(service, input_ids=[1, 97]), "[invalid_request:input_ids] the prompt has token id 97; allowed: 0 to 96"),
        (ask(service, input_ids=[]), "[invalid_request] the prompt has no tokens"),
        (ask(service, input_ids=[1] * 200), "[context_length_exceeded] the prompt has 200 tokens, 127 are allowed"),
    ]
    for channel, words in bad:
        (error,) = channel.wait().errors
        assert str(error).startswith(words) and not channel.responses
    assert all(channel.wait().text == answer("hello", 20) for channel in good)


def test_g01_a_full_queue_refuses_at_once_with_the_numbers(make_service):
    gate = Gate(make_engine(max_num_seqs=1, max_waiting=2))
    service = make_service(engine=gate.engine)
    channels = [ask(service, text_input="hello", max_tokens=3)]
    gate.wait_until_held()
    channels += [ask(service, text_input="hello", max_tokens=3) for _ in range(4)]
    gate.open()
    errors = [str(e) for c in channels for e in c.wait().errors]
    assert errors == ["[overloaded] 2 requests wait already, 2 are allowed"] * 2


class Gate:
    """An engine whose steps wait until they are let through."""

    def __init__(self, engine):
        self.engine = engine
        self.num_steps = 0
        self._step, engine.step = engine.step, self._held
        self._may, self._held_up = threading.Event(), threading.Event()

    def _held(self):
        self._held_up.set()
        assert self._may.wait(60)
        self.num_steps += 1
        return self._step()

    def wait_until_held(self):
        assert self._held_up.wait(60)

    def open(self):
        self._may.set()


def test_a_grammar_is_compiled_beside_the_engine(make_service):
    """While one request's grammar compiles the others go on; a client that left meanwhile is not served."""
    engine = make_engine()
    may, compile_grammar = threading.Event(), engine.compile_grammar
    engine.compile_grammar = lambda params: may.wait(60) and compile_grammar(params)
    service = make_service(engine=engine)
    pattern = json.dumps({"structured_outputs": {"regex": "[a-c]{5}"}})
    waiting = ask(service, text_input="hello", sampling_parameters=pattern)
    gone = ask(service, RecordingChannel(cancelled=True), text_input="hello", sampling_parameters=pattern)
    assert ask(service, text_input="hello", max_tokens=9).wait().text == answer("hello", 9)
    assert not gone.wait().responses and not waiting.responses
    may.set()
    assert set(waiting.wait().text) <= set("abc") and len(waiting.text) == 5
    again = ask(service, text_input="hello", sampling_parameters=pattern)  # known by now
    assert again.wait().text == waiting.text
    assert not engine.has_requests and engine.stats().num_masks == 10


def test_waiting_for_a_grammar_is_waiting(make_service):
    """A request's times begin when it came, not when the engine hears of it."""
    engine = make_engine(clock=time.monotonic_ns)
    may, compile_grammar = threading.Event(), engine.compile_grammar
    engine.compile_grammar = lambda params: may.wait(60) and compile_grammar(params)
    service = make_service(engine=engine)
    pattern = json.dumps({"structured_outputs": {"regex": "[a-c]{5}"}})
    waiting = ask(service, text_input="hello", sampling_parameters=pattern)
    sent_ns = time.monotonic_ns()
    for _ in range(5):
        ask(service, text_input="hello", max_tokens=100).wait()
    held_s = (time.monotonic_ns() - sent_ns) / 1e9
    may.set()
    waiting.wait()
    service.close()
    found = {series.name: value for series, value in service.metrics.snapshot().items() if not series.labels}
    assert found["vllm:request_queue_time_seconds_count"] == 6
    assert found["vllm:request_queue_time_seconds_sum"] >= held_s
    assert found["vllm:time_to_first_token_seconds_sum"] >= found["vllm:request_queue_time_seconds_sum"]


def test_a_grammar_that_is_not_taken_is_an_invalid_request(make_service):
    service = make_service()
    for value in ({"regex": "(("}, {"regex": ""}, {"json": {"uniqueItems": True}}):
        text = json.dumps({"structured_outputs": value})
        (error,) = ask(service, text_input="hello", sampling_parameters=text).wait().errors
        assert str(error).startswith("[invalid_request:structured_outputs]")
    assert ask(service, text_input="hello", max_tokens=9).wait().text == answer("hello", 9)


def wait_until_idle(engine):
    deadline = time.monotonic() + 60
    while engine.has_requests:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_answer_that_leaves_its_grammar_is_the_requests_own_error(make_service):
    engine = make_engine()
    masks = engine._grammars.masks
    engine._grammars.masks = lambda requests: [np.full_like(mask, -1) for mask in masks(requests)]
    service = make_service(engine=engine)
    pattern = json.dumps({"structured_outputs": {"regex": "[a-c]{60}"}, "ignore_eos": True})
    (error,) = ask(service, text_input="hello", max_tokens=60, sampling_parameters=pattern).wait().errors
    assert str(error).startswith("[invalid_request:structured_outputs] structured_outputs: the answer cannot go on")
    assert ask(service, text_input="hello", max_tokens=9).wait().text == answer("hello", 9)


def test_f09_f10_generation_ends_within_three_steps_of_a_cancel_and_the_blocks_are_free(make_service):
    engine = make_engine()
    service = make_service(engine=engine)
    channel = RecordingChannel()
    at_cancel = []
    step = engine.step

    def counted():
        outputs = step()
        if len(channel.responses) >= 2 and not channel.cancelled:
            channel.cancelled = True
            at_cancel.append(engine.stats().num_steps)
        return outputs

    engine.step = counted
    ask(service, channel, text_input="hello", max_tokens=100, stream=True)
    channel.wait()
    wait_until_idle(engine)
    assert engine.stats().num_steps - at_cancel[0] <= 3 and engine.stats().scheduler.num_free_blocks == 64
    assert not channel.errors


def test_f10_a_request_can_be_cancelled_by_its_id(make_service):
    engine = make_engine()
    service = make_service(engine=engine)
    stays = ask(service, text_input="world", max_tokens=40, stream=True, cancel_id="b")
    left = ask(service, text_input="hello", max_tokens=20, cancel_id="a", stream=True)
    waiting = ask(service, text_input="hello", max_tokens=20, cancel_id="a")
    left.wait_for_responses(2)
    for known in (True, False):  # whoever cancels what has ended already need not know
        order = cancel(service, cancel="a").wait()
        assert [order.text, order.errors, len(order.responses)] == ["", [], 1], known
        assert [str(left.errors), str(waiting.errors)] == [str([CANCELLED])] * 2
    assert left.num_late == waiting.num_late == 0 and not waiting.responses
    assert stays.wait().text == answer("world", 40)
    wait_until_idle(engine)
    assert engine.stats().scheduler.num_free_blocks == 64


def test_a_cancel_is_no_request_for_an_answer(make_service):
    service = make_service()
    stays = ask(service, text_input="hello", max_tokens=9, stream=True)  # it has no cancel_id
    for values, text in (
        ({"cancel": ""}, "[invalid_request:cancel] cancel is empty"),
        ({"cancel": ["a", "b"]}, "[invalid_request:cancel] cancel has the shape [2]"),
        ({"cancel": b"\xff"}, "[invalid_request:cancel] cancel is not UTF-8"),
        ({"cancel": "a", "text_input": "hello"}, "[invalid_request:cancel] cancel is given beside a prompt"),
    ):
        (error,) = cancel(service, **values).wait().errors
        assert str(error).startswith(text)
    assert stays.wait().text == answer("hello", 9)


def cancel(service, **values):
    channel = RecordingChannel()
    service.submit(channel, tensors(**values))
    return channel


def test_a_cancelled_request_that_waits_is_dropped_too(make_service):
    engine = make_engine(max_num_seqs=1)
    service = make_service(engine=engine)
    running = ask(service, text_input="hello", max_tokens=40, stream=True)
    waiting = ask(service, RecordingChannel(cancelled=True), text_input="world", max_tokens=40)
    assert waiting.wait().responses == [] and running.wait().text == answer("hello", 40)
    wait_until_idle(engine)
    assert engine.stats().num_output_tokens < 80


def test_a_channel_that_fails_ends_its_request_alone(make_service):
    engine = make_engine()
    service = make_service(engine=engine)
    broken = RecordingChannel(fails=True)
    ask(service, broken, text_input="hello", max_tokens=100, stream=True)
    good = ask(service, text_input="world", max_tokens=30, stream=True)
    assert good.wait().text == answer("world", 30)
    broken.wait()
    wait_until_idle(engine)
    assert engine.stats().scheduler.num_free_blocks == 64 and engine.stats().num_output_tokens < 130


def test_when_the_engine_fails_everybody_hears_of_it_and_so_do_later_ones(make_service):
    engine = make_engine()
    step, count = engine.step, []

    def failing():
        count.append(1)
        if len(count) == 4:
            raise RuntimeError("/home/somebody/secret.bin")
        return step()

    engine.step = failing
    heard, ended = [], threading.Event()
    service = Service(
        engine, ServiceOptions(), on_failure=lambda: (heard.extend(c.errors for c in open_ones), ended.set())
    )
    open_ones = [ask(service, text_input="hello", max_tokens=50, stream=True) for _ in range(3)]
    words = ["[internal] the engine failed with RuntimeError"]
    assert [[str(e) for e in c.wait().errors] for c in open_ones] == [words] * 3
    assert ended.wait(60) and [len(errors) for errors in heard] == [1, 1, 1]  # it ends the process: not too early
    assert [str(e) for e in ask(service, text_input="hello").wait().errors] == words


def test_closing_ends_what_is_open_and_refuses_what_comes_later(make_service):
    service = make_service()
    channel = ask(service, text_input="hello", max_tokens=120, stream=True)
    channel.wait_for_responses(1)
    service.close()
    assert [str(e) for e in channel.wait().errors] == ["[overloaded] the model is being unloaded"]
    late = ask(service, text_input="hello")
    assert late.wait().errors


def test_a_text_that_cannot_fit_is_not_even_tokenised(make_service):
    engine = make_engine()
    encode = engine.tokenizer.encode
    engine.tokenizer.encode = lambda text: encode(text) if len(text) < 3000 else pytest.fail("tokenised")
    service = make_service(engine=engine)
    # 128 tokens of one byte at most, and four times that for what normalisation may take away; looked at from 2,048 on.
    (error,) = ask(service, text_input="a" * 3000).wait().errors
    assert str(error) == (
        "[context_length_exceeded] the prompt has 3,000 bytes of text, 512 at most fit: prompt and answer together "
        "have room for 128 tokens"
    )
    (error,) = ask(service, text_input="a" * 1000).wait().errors
    assert str(error).startswith("[context_length_exceeded] the prompt has 1000 tokens, 127 are allowed")


def test_a_deadline_ends_an_answer_with_its_reason(make_service):
    clock = SteppingClock()
    service = make_service(engine=make_engine(clock=clock))
    channel = ask(service, text_input="hello", max_tokens=120, stream=True, deadline_ms=40.0, return_finish_reason=True)
    channel.wait()
    assert channel.responses[-1]["finish_reason"][0] == b"deadline"
    assert answer("hello", 120).startswith(channel.text) and 0 < len(channel.text) < 120


class SteppingClock:
    """A clock on which every look takes a millisecond."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        self.now_ns += 1_000_000
        return self.now_ns


def test_the_default_deadline_is_for_requests_without_one(make_service):
    service = make_service(ServiceOptions(default_deadline_ms=40.0), engine=make_engine(clock=SteppingClock()))
    cut = ask(service, text_input="hello", max_tokens=120, return_finish_reason=True).wait()
    assert cut.responses[0]["finish_reason"][0] == b"deadline"
    whole = ask(service, text_input="hello", max_tokens=120, return_finish_reason=True, deadline_ms=1e9).wait()
    assert whole.responses[0]["finish_reason"][0] == b"length"


class Seen:
    """An observer that writes down what it is told."""

    def __init__(self):
        self.told = []

    def added(self, request_id, params, received_ns):
        self.told.append(("added", request_id, params.max_tokens))

    def refused(self, kind):
        self.told.append(("refused", kind))

    def stepped(self, outputs, stats, now_ns):
        self.told.append(("stepped", sum(len(o.delta.token_ids) for o in outputs), stats.num_steps))

    def failed(self, now_ns):
        self.told.append(("failed",))


def test_observers_are_told_of_everything():
    seen, engine = Seen(), make_engine()
    service = Service(engine, ServiceOptions(), [seen])
    ask(service, text_input="hello", temperature=-1.0).wait()
    ask(service, input_ids=[97]).wait()
    ask(service, text_input="hello", max_tokens=2).wait()
    service.close()
    assert seen.told == [
        ("refused", "invalid_request"),
        ("refused", "invalid_request"),
        ("added", "1", 2),
        ("stepped", 1, 1),
        ("stepped", 1, 2),
    ]


@pytest.mark.parametrize("name", ["added", "refused", "stepped"])
def test_an_observer_that_fails_hears_nothing_more_and_no_request_suffers(name, make_service):
    seen = Seen()

    def fail(*arguments):
        seen.told.append("failed here")
        raise RuntimeError("out of counters")

    setattr(seen, name, fail)
    service = Service(make_engine(), ServiceOptions(), [seen])
    assert ask(service, input_ids=[97]).wait().errors
    assert ask(service, text_input="hello", max_tokens=9).wait().text == answer("hello", 9)
    service.close()
    assert seen.told.count("failed here") == 1 and seen.told[-1] == "failed here"


def test_options_of_the_config_are_checked():
    assert ServiceOptions.from_parameters({"other": "x"}).default_deadline_ms is None
    assert ServiceOptions.from_parameters({"default_deadline_ms": "60000"}).default_deadline_ms == 60000
    for text in ("soon", "0", "-1", "nan"):
        with pytest.raises(UsageError, match=f"default_deadline_ms is '{text}' in config.pbtxt"):
            ServiceOptions.from_parameters({"default_deadline_ms": text})


def test_f07_one_instance_on_a_device():
    check_instances([(1, [])])
    check_instances([(1, [0]), (1, [1])])
    for groups in ([(2, [])], [(1, []), (1, [])], [(1, [0, 1]), (1, [1])]):
        with pytest.raises(UsageError, match="instance_group has the counts"):
            check_instances(groups)


def test_what_the_stub_imports_is_little():
    """The start of a model is mostly imports otherwise: torch alone takes seconds."""
    code = (
        "import sys, backends.llm.serving.service, backends.llm.serving.metrics_publisher\n"
        "from backends.llm.engine.load import engine_settings\n"
        "engine_settings({})\n"
        "heavy = ('torch', 'onnx', 'onnxruntime', 'onnxscript', 'transformers', 'tritonclient', 'rich', 'click')\n"
        "heavy += ('openvino', 'numba')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
