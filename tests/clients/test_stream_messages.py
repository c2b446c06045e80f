"""The fast reader of a stream's messages against protobuf."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients import EngineFailed
from clients.generation import Chunk, ChunkReader, Usage
from clients.grpc_messages import messages
from clients.requests import InferRequest, InputTensor
from clients.stream_messages import StreamMessages
from clients.tensors import encode_items

Output = tuple[str, str, tuple[int, ...], bytes]


def message(outputs: list[Output], *, final: bool = False) -> bytes:
    found = messages().ModelStreamInferResponse()
    answer = found.infer_response
    answer.model_name, answer.model_version, answer.id = "chat", "1", "request"
    if final:
        answer.parameters["triton_final_response"].bool_param = True
    for name, datatype, shape, raw in outputs:
        answer.outputs.add(name=name, datatype=datatype, shape=shape)
        answer.raw_output_contents.append(raw)
    return bytes(found.SerializeToString())


def answer_of(text: str, reason: str, produced: int) -> list[Output]:
    return [
        ("text_output", "BYTES", (1,), encode_items([text.encode()])),
        ("finish_reason", "BYTES", (1,), encode_items([reason.encode()])),
        ("num_input_tokens", "UINT32", (1,), np.uint32(7).tobytes()),
        ("num_output_tokens", "UINT32", (1,), np.uint32(produced).tobytes()),
    ]


FINISH_REASON = InputTensor("return_finish_reason", "BOOL", (1,), b"\1")
REQUEST = InferRequest("chat", "", (FINISH_REASON,))


def test_a_stream_of_texts_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, chunks, parsed = StreamMessages(), ChunkReader(REQUEST), []
    parse = StreamMessages._parse
    monkeypatch.setattr(StreamMessages, "_parse", lambda self, raw: parsed.append(raw) or parse(self, raw))
    texts = ["a", "é" * 100, "", "x" * 20_000, "end"]  # lengths of one, two and three bytes
    read = []
    for index, text in enumerate(texts, start=1):
        reason = "stop" if index == len(texts) else "None"
        read += chunks.read(reader.read(message(answer_of(text, reason, 1))))
    assert read == [
        *(Chunk(text) for text in texts if text != "" and text != "end"),
        Chunk("end", finish_reason="stop", usage=Usage(7, 5)),
    ]
    assert chunks.finished and len(parsed) == 1


Values = tuple[str, list[str | int]]
_OUTPUTS = st.lists(
    st.one_of(
        st.tuples(st.just("BYTES"), st.lists(st.text(), min_size=1, max_size=3)),
        st.tuples(st.just("INT32"), st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)),
    ),
    max_size=4,
)


@given(st.lists(st.tuples(_OUTPUTS, st.booleans()), max_size=6))
def test_whatever_comes_is_read_as_protobuf_reads_it(
    sent: list[tuple[list[Values], bool]],
) -> None:
    reader = StreamMessages()
    for outputs, final in sent:
        described = []
        for place, (datatype, values) in enumerate(outputs):
            raw = (
                encode_items([str(value).encode() for value in values])
                if datatype == "BYTES"
                else np.array(values, np.int32).tobytes()
            )
            described.append((f"o{place}", datatype, (len(values),), raw))
        get = reader.read(message(described, final=final))
        assert [get(f"o{place}") for place in range(len(outputs))] == [values for _, values in outputs]
        assert get(f"o{len(outputs)}") is None


def test_an_error_after_responses_is_seen() -> None:
    reader = StreamMessages()
    reader.read(message(answer_of("a", "None", 1)))
    failed = messages().ModelStreamInferResponse(error_message="[internal] the engine failed")
    with pytest.raises(EngineFailed):
        reader.read(failed.SerializeToString())
    # Triton sends an error with an empty response beside it.
    failed.infer_response.CopyFrom(messages().ModelInferResponse())
    with pytest.raises(EngineFailed):
        reader.read(failed.SerializeToString())


def test_what_is_cut_is_no_response() -> None:
    reader = StreamMessages()
    whole = message(answer_of("abc", "None", 1))
    reader.read(whole)
    for size in range(1, len(whole)):
        assert reader._contents(whole[:size]) is None
