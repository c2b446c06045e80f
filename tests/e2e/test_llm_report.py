"""`perf-report llm` and the demo's chat on a real tritonserver and its OpenAI front end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from ensembles.text_embedding.chat import MODEL, QUESTION, SCHEMA, chat
from perf.cli import main
from perf.llm.report import LlmReport, llm_report_from_document
from tests.serving import Served, serve, write_llm

COUNT, INPUT, OUTPUT = 4, 40, 8
QUICK = ("--request-count", "4", "--warmup-request-count", "1", "--input-tokens", "40", "--output-tokens", "8")
# Of prompts of their own: both ways lead to one engine with one prefix cache.
SEEDS = {"grpc": "1", "openai": "2"}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("llm") / "repository"
    write_llm(repository, MODEL, smollm2, kv_cache_bytes=128 << 20, max_model_len=512)
    with serve(repository, "--openai-port", "0") as served:
        yield served


def measure(server: Served, folder: Path, endpoint: str, *more: str, model: str = MODEL) -> LlmReport:
    url = server.grpc if endpoint == "grpc" else server.openai
    options = ("-m", model, "--endpoint", endpoint, "-u", url, "--output-dir", str(folder), "--json")
    result = CliRunner().invoke(main, ["llm", *options, *QUICK, *more])
    assert result.exit_code in (0, 1), result.output
    return llm_report_from_document(json.loads(result.stdout), "stdout")


@pytest.mark.parametrize("endpoint", ["grpc", "openai"])
def test_tokens_are_counted_exactly(server: Served, tmp_path: Path, endpoint: str) -> None:
    options = ("--concurrency-range", "4", "--goodput", "ttft:600000 tpot:600000", "--random-seed", SEEDS[endpoint])
    report = measure(server, tmp_path, endpoint, *options)
    (one,) = report.levels[0].measurements
    assert (one.completed, one.failed) == (COUNT, 0), one.errors
    assert (one.output_tokens, one.input_tokens, one.cached_tokens) == (COUNT * OUTPUT, COUNT * INPUT, 0)
    assert one.ttft is not None and one.tpot is not None and one.itl is not None and one.e2e is not None
    assert (one.ttft.samples, one.tpot.samples) == (COUNT, COUNT)
    assert 0 < one.ttft.low < one.e2e.low
    assert one.goodput_rps == one.requests_rps
    assert (tmp_path / "llm.html").exists() and "8 output tokens" in report.subject.prompts


@pytest.mark.parametrize("endpoint", ["grpc", "openai"])
def test_shared_prefixes_come_from_the_cache(server: Served, tmp_path: Path, endpoint: str) -> None:
    prefix = ("--shared-prefix", "64:1", "--random-seed", "1" + SEEDS[endpoint])
    (one,) = measure(server, tmp_path, endpoint, *prefix).levels[0].measurements
    assert one.input_tokens == COUNT * (64 + INPUT)
    # The warm-up has put it there; a prompt's own tokens are never in it.
    assert one.cached_tokens is not None and COUNT * 64 <= one.cached_tokens < COUNT * 96


@pytest.mark.parametrize("endpoint", ["grpc", "openai"])
def test_h11_whole_answers_have_no_ttft(server: Served, tmp_path: Path, endpoint: str) -> None:
    (one,) = measure(server, tmp_path, endpoint, "--no-stream", "--prompts", "text").levels[0].measurements
    assert (one.completed, one.output_tokens, one.ttft, one.itl) == (COUNT, COUNT * OUTPUT, None, None), one.errors


def test_chat_goes_through_the_template(server: Served, tmp_path: Path) -> None:
    (one,) = measure(server, tmp_path, "openai", "--prompts", "chat", "--stop-at-eos").levels[0].measurements
    assert one.completed == COUNT and one.input_tokens is not None and one.input_tokens > COUNT * INPUT, one.errors


@pytest.mark.parametrize("endpoint", ["grpc", "openai"])
def test_an_unknown_model_is_refused_in_one_line(server: Served, tmp_path: Path, endpoint: str) -> None:
    url = server.grpc if endpoint == "grpc" else server.openai
    options = ("-m", "nope", "--endpoint", endpoint, "-u", url, "--output-dir", str(tmp_path))
    result = CliRunner().invoke(main, ["llm", *options, *QUICK])
    assert result.exit_code == 2 and "'nope'" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("endpoint", "kind"), [("grpc", "context_length_exceeded"), ("openai", "http 400")])
def test_h07_prompts_that_do_not_fit_are_failures(server: Served, tmp_path: Path, endpoint: str, kind: str) -> None:
    (one,) = measure(server, tmp_path, endpoint, "--input-tokens", "600").levels[0].measurements
    assert (one.completed, one.failed, one.ttft, one.output_tokens) == (0, COUNT, None, 0)
    assert kind in one.errors[0].kind and "512" in one.errors[0].message


def test_the_demos_chat_streams_and_keeps_to_its_schema(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(server.openai)
    printed = capsys.readouterr().out
    assert QUESTION in printed and "sky" in printed.split(QUESTION)[1]
    answer = json.loads(printed[printed.index("{") :])
    assert answer.keys() == SCHEMA["properties"].keys() and type(answer["population"]) is int
