"""Language models on a real tritonserver: what comes over gRPC and HTTP is what the engine says."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tritonclient.grpc as grpc

from backends.llm import LLMEngine, SamplingParams
from backends.llm.tokenizers import load_tokenizer
from compiler.llm.config import llm_config
from compiler.shared_memory import shared_memory_prefix
from compiler.triton_config import text_from_config
from tests.serving import serve, write_llm, write_python_model

PATIENCE_S = 120
PROMPTS = ["The capital of France is", "def fibonacci(n):", "1, 2, 3, 4, 5,", "Grüße aus"]
KINDS = {bool: "BOOL", int: "INT32", float: "FP32", str: "BYTES"}


# The backend itself around a toy engine that fails when it computes a prompt of 13 tokens; one of 5 waits for that.
BREAKS = """
import time
from backends.llm.model import TritonPythonModel as LlmModel
from backends.llm.serving.options import ServiceOptions
from backends.llm.serving.service import Service
from tests.backends.llm.engine.test_engine import make_engine

def load(folder, options, on_failure):
    engine = make_engine()
    step = engine.step
    def step_or_fail():
        lengths = {request.num_prompt_tokens: request.num_output_tokens for request in engine.scheduler.running}
        if 13 in lengths:
            raise RuntimeError("the disk is on fire")
        if lengths.get(5) == 2 and engine.scheduler.num_waiting == 0:
            time.sleep(0.001)
            return []
        return step()
    engine.step = step_or_fail
    return Service(engine, options, on_failure=on_failure)

class TritonPythonModel(LlmModel):
    def initialize(self, args):
        Service.load = load
        super().initialize(args)
"""


@pytest.fixture(scope="module")
def repository(smollm2, tmp_path_factory):
    """Two models, so that one is seen not to disturb the other; the second answers one request at a time."""
    path = tmp_path_factory.mktemp("llm") / "repository"
    cache = str(tmp_path_factory.mktemp("graphs"))
    write_llm(path, "chat", smollm2, exact=True, kv_cache_bytes=256 << 20, cache_dir=cache, max_waiting=64)
    write_python_model(
        path, "breaks", BREAKS, text_from_config(llm_config("breaks", "KIND_CPU")).replace('"llm"', '"python"')
    )
    write_llm(
        path, "alone", smollm2, exact=True, kv_cache_bytes=64 << 20, cache_dir=cache, max_num_seqs=1, max_waiting=1
    )
    return path


@pytest.fixture(scope="module")
def plain(repository):
    """The answers of the engine itself, in exact mode: prompt -> text and token ids of 24 tokens."""
    engine = LLMEngine.load(repository / "alone" / "1")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    try:
        return {p: engine.generate([p], params)[0].outputs[0] for p in PROMPTS}
    finally:
        engine.close()


@pytest.fixture(scope="module")
def server(repository, plain):
    with serve(repository) as served:
        yield served


@dataclass
class Stream:
    """One gRPC stream; `read` gives what came of one request."""

    client: grpc.InferenceServerClient
    arrived: queue.Queue

    def send(self, request_id, *, model="chat", timeout_us=None, **values):
        inputs = [tensor(name, value) for name, value in values.items()]
        self.client.async_stream_infer(
            model, inputs, request_id=request_id, enable_empty_final_response=True, timeout=timeout_us
        )

    def next(self):
        """Returns (request id, its outputs or None, error, whether it is the final response)."""
        result, error = self.arrived.get(timeout=PATIENCE_S)
        if error is not None:
            return None, None, str(error), True
        response = result.get_response()
        outputs = {o.name: result.as_numpy(o.name) for o in response.outputs}
        final = response.parameters["triton_final_response"].bool_param
        return response.id, outputs, "", final

    def read(self, count=1):
        """Returns request id -> its responses, when that many have ended."""
        found, errors = {}, []
        while count:
            request_id, outputs, error, final = self.next()
            if error:
                errors.append(error)
            elif outputs:
                found.setdefault(request_id, []).append(outputs)
            count -= final
        return found, errors


@pytest.fixture
def stream(server):
    arrived: queue.Queue = queue.Queue()
    client = grpc.InferenceServerClient(server.grpc)
    client.start_stream(lambda result, error: arrived.put((result, error)))
    yield Stream(client, arrived)
    client.stop_stream(cancel_requests=True)
    client.close()


def tensor(name, value):
    values = value if isinstance(value, list) else [value]
    kind = KINDS[type(values[0])] if name != "seed" else "INT64"
    data = np.array([v.encode() if isinstance(v, str) else v for v in values])
    found = grpc.InferInput(name, [len(values)], kind)
    found.set_data_from_numpy(
        data.astype(object) if kind == "BYTES" else data.astype({"FP32": "f4"}.get(kind, kind.lower()))
    )
    return found


def post(server, path, body, model="chat"):
    request = urllib.request.Request(f"http://{server.http}/v2/models/{model}/{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def text_of(responses, index=0):
    return b"".join(r["text_output"][index] for r in responses).decode()


ENDLESS = '{"ignore_eos": true}'
GREEDY = '{"ignore_eos": true, "max_tokens": 24}'


def test_streams_side_by_side_are_the_engines_tokens_one_by_one(stream, plain):
    for i, prompt in enumerate(PROMPTS):
        stream.send(str(i), text_input=prompt, stream=True, sampling_parameters=GREEDY, return_token_ids=True)
    found, errors = stream.read(len(PROMPTS))
    assert not errors
    for i, prompt in enumerate(PROMPTS):
        tokens = [r["token_ids"].tolist() for r in found[str(i)]]
        assert [t for (t,) in tokens] == list(plain[prompt].token_ids) and text_of(found[str(i)]) == plain[prompt].text


def test_one_response_begins_with_the_prompt_as_that_of_tritons_vllm_backend(stream, plain):
    prompt = PROMPTS[0]
    stream.send("a", text_input=prompt, stream=False, sampling_parameters=GREEDY)
    found, errors = stream.read()
    assert not errors and [text_of(found["a"])] == [prompt + plain[prompt].text] and len(found["a"]) == 1


def test_generate_and_generate_stream_over_http(server, plain):
    prompt = PROMPTS[1]
    body = {"text_input": prompt, "max_tokens": 24, "ignore_eos": True, "exclude_input_in_output": True}
    status, text = post(server, "generate", body)
    assert status == 200 and json.loads(text)["text_output"] == plain[prompt].text
    # As the documents of Triton's vLLM backend have it: what is no input goes into "parameters".
    parameters = {"stream": False, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    body = {"text_input": prompt, "parameters": parameters}
    status, text = post(server, "generate", body)
    assert status == 200 and json.loads(text)["text_output"] == prompt + plain[prompt].text
    status, text = post(server, "generate_stream", {**body, "parameters": {**parameters, "stream": True}})
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert status == 200 and len(events) >= 20
    assert "".join(e["text_output"] for e in events) == plain[prompt].text


def test_a_client_of_tritons_vllm_backend_works_unchanged(stream):
    """Its parameters are texts, and are sent twice: as a tensor and as the request's own."""
    parameters = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "10"}
    inputs = [tensor("text_input", "Hello, my name is"), tensor("stream", True)]
    inputs.append(tensor("sampling_parameters", json.dumps(parameters)))
    stream.client.async_stream_infer(
        "chat",
        inputs,
        request_id="7",
        outputs=[grpc.InferRequestedOutput("text_output")],
        parameters=parameters,
        enable_empty_final_response=True,
    )
    found, errors = stream.read()
    assert not errors and 1 <= len(found["7"]) <= 10 and all(list(r) == ["text_output"] for r in found["7"])


def test_g35_outputs_come_where_they_are_asked_for(stream, plain):
    prompt = PROMPTS[0]
    wanted = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    stream.send(
        "all",
        text_input=prompt,
        stream=True,
        sampling_parameters=GREEDY,
        logprobs=2,
        **{f"return_{name}": True for name in wanted},
    )
    stream.send("none", text_input=prompt, stream=True, sampling_parameters=GREEDY)
    found, errors = stream.read(2)
    assert not errors and all(list(r) == ["text_output"] for r in found["none"])
    responses = found["all"]
    assert all(set(r) == {"text_output", *wanted} and r["logprobs"].shape == (1,) for r in responses)
    chosen = [next(iter(entry)) for r in responses for entry in json.loads(r["logprobs"][0])]
    assert [int(i) for i in chosen] == list(plain[prompt].token_ids)
    assert [r["num_output_tokens"][0] for r in responses] == [1] * 24
    assert [r["finish_reason"][0] for r in responses] == [b"None"] * 23 + [b"length"]


def test_n_answers(stream):
    parameters = '{"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": true}'
    stream.send("n", text_input=PROMPTS[0], stream=True, sampling_parameters=parameters)
    stream.send("one", text_input=PROMPTS[0], sampling_parameters=parameters, exclude_input_in_output=True)
    found, errors = stream.read(2)
    (whole,) = found["one"]
    assert not errors and whole["text_output"].shape == (2,) and len(set(whole["text_output"])) == 2
    assert [text_of(found["n"], i).encode() for i in range(2)] == whole["text_output"].tolist()


def test_g13_g14_a_stop_string_over_token_borders(stream, plain):
    prompt = PROMPTS[0]
    text = plain[prompt].text
    stop = text[3:9]
    for name, streamed in (("stream", True), ("whole", False)):
        stream.send(
            name,
            text_input=prompt,
            stream=streamed,
            sampling_parameters=GREEDY,
            stop=[stop],
            return_finish_reason=True,
            exclude_input_in_output=True,
        )
    found, errors = stream.read(2)
    assert not errors and text_of(found["stream"]) == text_of(found["whole"]) == text[:3]
    assert found["stream"][-1]["finish_reason"][0] == found["whole"][-1]["finish_reason"][0] == b"stop"


def test_g16_an_answer_that_is_half_a_character_has_no_text(server, smollm2):
    tokenizer = load_tokenizer(smollm2)
    first, *others = tokenizer.encode("🙂")
    assert others and tokenizer.token_bytes(first) in "🙂".encode()
    body = {"text_input": "a", "exclude_input_in_output": True, "return_num_output_tokens": True}
    parameters = json.dumps({"logit_bias": {str(first): 100}, "max_tokens": 1})
    status, text = post(server, "generate", {**body, "sampling_parameters": parameters})
    answer = json.loads(text)
    assert (status, answer["text_output"], answer["num_output_tokens"]) == (200, "", 1)


def test_errors_of_every_kind_between_good_requests(stream, plain):
    bad = [
        (dict(text_input="a", temperature=-1.0), "[invalid_request:temperature] temperature is -1.0; allowed:"),
        (dict(text_input="a", input_ids=[1]), "[invalid_request:text_input] both text_input and input_ids are given"),
        (dict(stream=True), "[invalid_request:text_input] neither text_input nor input_ids is given"),
        (dict(text_input="a", sampling_parameters="{"), "[invalid_request:sampling_parameters] sampling_parameters is"),
        (dict(input_ids=[49152]), "[invalid_request:input_ids] the prompt has token id 49152; allowed: 0 to 49151"),
        (dict(input_ids=[5] * 4096), "[context_length_exceeded] the prompt has 4096 tokens, 4095 are allowed"),
        (dict(text_input="a", max_tokens=4000, deadline_ms=0.001, sampling_parameters=ENDLESS), "[deadline]"),
    ]
    for i, (values, _) in enumerate(bad):
        stream.send(f"good{i}", text_input=PROMPTS[i % 4], stream=True, sampling_parameters=GREEDY)
        stream.send(f"bad{i}", **values)
    found, errors = stream.read(2 * len(bad))
    for _, words in bad:
        assert sum(words in e for e in errors) == 1, (words, errors)
    for i in range(len(bad)):
        assert text_of(found[f"good{i}"]) == plain[PROMPTS[i % 4]].text


def test_f08_requests_overlap(stream):
    """Each is under way before the first one ends, though one instance executes them one after the other."""
    for i in range(8):
        stream.send(str(i), text_input=f"{i}, ", stream=True, sampling_parameters=GREEDY)
    begun, final = set(), False
    while not final:
        request_id, _, error, final = stream.next()
        assert not error
        begun.add(request_id)
    assert begun == {str(i) for i in range(8)}
    found, errors = stream.read(7)
    assert not errors and len(found) == 7


def test_f03_errors_take_no_shared_memory(server, stream):
    def sizes():
        found = {
            p.name: p.stat().st_size for p in Path("/dev/shm").glob(f"{shared_memory_prefix(server.process.pid)}*")
        }
        assert len(found) >= 3  # a region for each model
        return found

    def fail(count):
        for i in range(count):
            bad = dict(temperature=-1.0) if i % 2 else dict(sampling_parameters="{" + "x" * 5000)
            stream.send(f"bad{i}", text_input="a", **bad)
        _, errors = stream.read(count)
        assert len(errors) == count

    fail(20)
    before = sizes()
    fail(400)
    assert sizes() == before


def test_a_full_queue_refuses_with_its_numbers(stream):
    """The model `alone` computes one request; one may wait."""
    stream.send("running", model="alone", text_input="a", stream=True, max_tokens=80, sampling_parameters=ENDLESS)
    assert stream.next()[0] == "running"
    for i in range(3):
        stream.send(f"more{i}", model="alone", text_input="b", max_tokens=1)
    found, errors = stream.read(4)
    assert len(errors) == 2 and all("[overloaded] 1 requests wait already, 1 are allowed" in e for e in errors)
    assert len(found["running"]) >= 70 and "more0" in found


def numbers(server):
    """Returns what the metrics say of `alone`: answers that were given up, tokens made, blocks in use."""
    with urllib.request.urlopen(server.metrics, timeout=PATIENCE_S) as response:
        lines = [line for line in response.read().decode().splitlines() if 'model="alone"' in line]
    names = ('request_success_total{.*finished_reason="abort"', "generation_tokens_total{", 'kv_blocks{.*state="used"')
    return [next(float(line.rsplit(" ", 1)[1]) for line in lines if re.search(name, line)) for name in names]


def check_that_it_is_given_up(server, before):
    """A long answer of `alone` ends as given up, far from its end, and the model answers others."""
    wait_until(lambda: numbers(server)[0] == before[0] + 1 and numbers(server)[2] == 0)
    assert numbers(server)[1] - before[1] < 1000
    status, text = post(server, "generate", {"text_input": "b", "max_tokens": 2}, model="alone")
    assert status == 200 and json.loads(text)["text_output"].startswith("b")


def test_f09_f10_a_cancel_frees_the_model(server):
    before = numbers(server)
    arrived: queue.Queue = queue.Queue()
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: arrived.put((result, error)))
        first = Stream(client, arrived)
        first.send("a", model="alone", text_input="a", stream=True, max_tokens=1200, sampling_parameters=ENDLESS)
        assert first.next()[0] == "a"
        client.stop_stream(cancel_requests=True)
        check_that_it_is_given_up(server, before)


def test_f09_a_disconnected_http_stream_frees_the_model(server):
    before = numbers(server)
    body = {"text_input": "a", "stream": True, "max_tokens": 1200, "ignore_eos": True}
    request = urllib.request.Request(f"http://{server.http}/v2/models/alone/generate_stream", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.readline().startswith(b"data: ")
    check_that_it_is_given_up(server, before)


def test_a_deadline_and_tritons_own_timeout_end_an_answer(stream):
    # Without ignore_eos an answer may be one token long, so it is taken; with this bias it is not.
    endless = '{"logit_bias": {"0": -100, "2": -100}, "max_tokens": 1200}'
    values = dict(text_input="a", sampling_parameters=endless, return_finish_reason=True, return_num_output_tokens=True)
    stream.send("deadline", deadline_ms=1500.0, **values)
    stream.send("timeout", timeout_us=1_500_000, **values)
    found, errors = stream.read(2)
    assert not errors
    for name in ("deadline", "timeout"):
        (response,) = found[name]
        assert response["finish_reason"][0] == b"deadline" and 0 < response["num_output_tokens"][0] < 1200


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_structured_output_beside_free_answers(server, stream, plain):
    """In the server's own process; each grammar is compiled first in one that it starts."""
    kept = {
        "json": {"json": PERSON},
        "regex": {"regex": r"[A-Z][a-z]{1,9} \d{2}!"},
        "choice": {"choice": ["Paris", "London"]},
    }
    for name, value in kept.items():
        for i, prompt in enumerate(PROMPTS[:2]):
            parameters = json.dumps({"structured_outputs": value, "max_tokens": 90, "temperature": 1.5, "seed": i})
            stream.send(f"{name}{i}", text_input=prompt, stream=True, sampling_parameters=parameters)
            stream.send(f"free {name}{i}", text_input=prompt, stream=True, sampling_parameters=GREEDY)
    found, errors = stream.read(12)
    assert not errors
    for i, prompt in enumerate(PROMPTS[:2]):
        jsonschema.validate(json.loads(text_of(found[f"json{i}"])), PERSON)
        assert re.fullmatch(kept["regex"]["regex"], text_of(found[f"regex{i}"]))
        assert text_of(found[f"choice{i}"]) in kept["choice"]["choice"]
        assert all(text_of(found[f"free {name}{i}"]) == plain[prompt].text for name in kept)
    # As `/generate` has it: what is no input of the model is a parameter; Triton takes no objects there.
    body = {"text_input": "A person:", "sampling_parameters": json.dumps({"structured_outputs": {"json": PERSON}})}
    status, text = post(server, "generate", {**body, "max_tokens": 90, "exclude_input_in_output": True})
    assert status == 200
    jsonschema.validate(json.loads(json.loads(text)["text_output"]), PERSON)


def test_grammars_of_strangers_stop_nobody(stream, plain):
    """The second would keep the library busy for ever."""
    endless = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}b*"} for i in range(30)]}
    for i, value in enumerate([{"regex": "(("}, {"json": endless}, {"json": {"$ref": "http://localhost/a.json"}}]):
        parameters = json.dumps({"structured_outputs": value})
        stream.send(f"bad{i}", text_input="a", sampling_parameters=parameters)
    stream.send("good", text_input=PROMPTS[0], stream=True, sampling_parameters=GREEDY)
    found, errors = stream.read(4)
    assert len(errors) == 3 and all("[invalid_request:structured_outputs]" in error for error in errors)
    assert sum("processor time" in error for error in errors) == 1
    assert text_of(found["good"]) == plain[PROMPTS[0]].text


def test_when_the_engine_fails_all_hear_of_it_the_model_is_not_ready_and_comes_back(server, stream):
    stream.send("good", model="breaks", text_input="hello", max_tokens=100, stream=True, sampling_parameters=ENDLESS)
    assert stream.next()[0] == "good"
    stream.send("bad", model="breaks", input_ids=[1] * 13, max_tokens=100)
    _, errors = stream.read(2)
    assert all("[internal] the engine failed with RuntimeError" in e and "fire" not in e for e in errors)
    assert len(errors) == 2
    ready = stream.client.is_model_ready
    wait_until(lambda: not ready("breaks"))
    assert ready("chat") and ready("alone")
    wait_until(lambda: ready("breaks"))
    stream.send("again", model="breaks", text_input="hey", max_tokens=3)
    found, errors = stream.read()
    assert not errors and "again" in found


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
