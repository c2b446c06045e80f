"""`perf-report llm` from its words to its report, in all its forms."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from tritonclient.grpc import service_pb2

from perf.arrivals import Arrivals, ClosedLoop, OpenLoop
from perf.cli import main
from perf.environment import Environment
from perf.errors import UsageError
from perf.json_form import to_json
from perf.llm.comparison import compare_llm
from perf.llm.html import render_llm_html
from perf.llm.measurement import LlmRun, LlmSettings, summarise_llm
from perf.llm.payloads import Asking, grpc_payload
from perf.llm.prompts import LlmRequest
from perf.llm.report import LLM_SCHEMA, LlmLevel, LlmReport, LlmSubject, llm_report_from_document
from perf.llm.text import print_llm_report
from tests.perf.builders import report_of
from tests.perf.fake_llm_server import FakeLlm, Script, run_fake_llm
from tests.perf.test_llm_metrics import BROKEN, MS, outcome
from tests.perf.test_report import _Page

GOODPUT = LlmSettings(goodput_limits_ms={"ttft": 15.0, "tpot": 50.0}, request_count=5)


def llm_report(
    loads: list[Arrivals], tpots_ms: list[float], settings: LlmSettings = GOODPUT, failed: int = 0, count: int = 20
) -> LlmReport:
    """Every repeat has `count` answers of 3 tokens, of which some failed; one repeat for each TPOT."""

    def level(load: Arrivals) -> LlmLevel:
        measured = []
        for tpot in tpots_ms:
            one = outcome((10, 1), (10 + tpot, 1), (10 + 2 * tpot, 1))
            outcomes = [one] * (count - failed) + [outcome((5, 1), error=BROKEN)] * failed
            measured.append(summarise_llm(LlmRun(tuple(outcomes), 0, 1000 * MS, 0.01), load, settings))
        distribution = load.distribution if isinstance(load, OpenLoop) else None
        return LlmLevel(str(load), load.level, distribution, tuple(measured))

    settings = LlmSettings(**{**vars(settings), "repeats": len(tpots_ms)})
    subject = LlmSubject("chat<b>", "1", "grpc", "127.0.0.1:8001", "triton 2.51.0", "prompts & more")
    machine = Environment("host", "A CPU", 2, "Linux 6", "3.11", "1.85", True)
    created, command = "2026-01-02T03:04:05+00:00", "perf-report llm -m 'chat<b>'"
    levels = tuple(level(load) for load in loads)
    return LlmReport(LLM_SCHEMA, created, command, loads[0].mode, subject, settings, machine, levels)


CLOSED: list[Arrivals] = [ClosedLoop(1), ClosedLoop(8)]
OPEN: list[Arrivals] = [OpenLoop(2, "poisson"), OpenLoop(4, "poisson")]
WHOLE = LlmSettings(streamed=False)
REPORTS = [
    llm_report(CLOSED, [20.0]),
    llm_report(CLOSED, [20.0, 30.0], failed=2),
    llm_report(OPEN, [20.0]),
    llm_report([ClosedLoop(1)], [20.0], WHOLE),
    llm_report([ClosedLoop(1)], [20.0], failed=20),
]


def text_of(report: LlmReport) -> str:
    console = Console(file=io.StringIO(), force_terminal=False)
    print_llm_report(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("report", REPORTS)
def test_json_round_trip_is_exact(report: LlmReport) -> None:
    assert llm_report_from_document(json.loads(to_json(report)), "here") == report


def test_what_is_no_report_is_refused_by_name() -> None:
    document = json.loads(to_json(REPORTS[0]))
    for change in ({"schema": "other/9"}, {"levels": []}, {"levels": [{}]}, {"mode": 5}):
        with pytest.raises(UsageError, match=re.escape("some/llm.json")):
            llm_report_from_document(document | change, "some/llm.json")


def test_the_table_by_hand() -> None:
    lines = text_of(REPORTS[0]).splitlines()
    head, first = (re.split(r"  +", line.strip()) for line in lines[1:3])
    assert dict(zip(head, first, strict=True)) == {
        "concurrency": "1",
        "output tokens/s": "60.0",
        "req/s": "20.0",
        "TTFT p50 ms": "10.0",
        "TTFT p99 ms": "10.0?",
        "TPOT p50 ms": "20.0",
        "TPOT p99 ms": "20.0?",
        "ITL p99 ms": "20.0?",
        "E2E p50 ms": "50.0",
        "good/s": "20.0",
        "completed": "20",
        "failed": "0",
    }
    assert (
        "concurrency 1: 60 output tokens / 1.000 s = 60 tokens/s; 7 input tokens a request, 43% from the cache" in lines
    )


def test_h11_every_form_says_not_available_without_a_stream() -> None:
    text = text_of(REPORTS[3])
    assert "TTFT, TPOT, ITL: n/a: the answers were not streamed" in text and "not streamed" in text
    page = render_llm_html(REPORTS[3])
    assert page.count("<td>n/a</td>") == 5 and "Time to first token" not in page


@pytest.mark.parametrize("report", REPORTS)
def test_html_is_one_self_contained_well_formed_page(report: LlmReport) -> None:
    text = render_llm_html(report)
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.links == [] and "script" not in page.tags and "url(" not in text and "@import" not in text
    assert "chat<b>" not in text and "chat&lt;b&gt;" in text and "prompts &amp; more" in text
    assert "nan" not in re.sub(r"<style>.*</style>", "", text, flags=re.S).lower()
    if report.all_failed:
        assert "every request failed" in text and page.tags.count("figure") == 2
    elif report.settings.streamed:
        # tokens, requests, and for each of TTFT, TPOT, ITL and E2E its course and its distribution
        assert page.tags.count("figure") == 10


def test_h04_repeats_give_median_and_spread() -> None:
    report = llm_report([ClosedLoop(1)], [20.0, 40.0, 30.0])
    tpot = report.levels[0].latency("tpot", "p50")
    assert tpot is not None and (tpot.median, tpot.low, tpot.high) == (30, 20, 40)
    assert "30.0 [20.0, 40.0]" in text_of(report)


def test_h04_comparison_is_by_interval_and_names_what_differs() -> None:
    old, new = llm_report([ClosedLoop(1)], [20.0, 22.0]), llm_report([ClosedLoop(1)], [40.0, 44.0], WHOLE)
    comparison = compare_llm(llm_report([ClosedLoop(1)], [20.0, 22.0]), llm_report([ClosedLoop(1)], [40.0, 44.0]))
    changes = {change.figure: change for change in comparison.changes}
    assert changes["TPOT p50 ms"].ratio == 2.0 and changes["TPOT p50 ms"].overlap is False
    assert changes["TTFT p50 ms"].ratio == 1.0 and changes["TTFT p50 ms"].overlap is True
    assert changes["good/s"].ratio == 1.0 and comparison.differences == ()
    assert compare_llm(old, new).differences == ("streamed: True -> False",)


def test_h07_a_comparison_tells_failures_and_other_limits() -> None:
    loose = LlmSettings(goodput_limits_ms={"ttft": 1500.0}, request_count=5)
    old, new = llm_report([ClosedLoop(1)], [20.0, 20.0]), llm_report([ClosedLoop(1)], [20.0, 20.0], loose, failed=2)
    assert compare_llm(old, new).differences == (
        "failed requests at concurrency 1: 0 of 40 -> 4 of 40",
        "goodput limits: tpot <= 50 ms, ttft <= 15 ms -> ttft <= 1500 ms",
    )


def test_h15_modes_and_kinds_are_not_compared(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("closed.json", "open.json", "run.json")]
    texts = (to_json(REPORTS[0]), to_json(REPORTS[2]), to_json(report_of([ClosedLoop(1)], [[1.0]])))
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    refused = perf_report("compare", paths[0], paths[1])
    assert refused.exit_code == 2 and "closed loop with an open loop" in refused.stderr
    refused = perf_report("compare", paths[0], paths[2])
    assert refused.exit_code == 2 and "compare two of one kind" in refused.stderr
    assert "TPOT p50 ms" in perf_report("compare", paths[0], paths[0]).stdout


@pytest.fixture(scope="module")
def llm() -> Iterator[FakeLlm]:
    with run_fake_llm() as fake:
        yield fake


def perf_report(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def measure(llm: FakeLlm, folder: Path, *more: object, endpoint: str = "openai") -> Result:
    address = llm.grpc if endpoint == "grpc" else llm.http
    quick = ("--request-count", "6", "--warmup-request-count", "0")
    options = ("-m", "fake", "--endpoint", endpoint, "-u", address, "--output-dir", folder)
    return perf_report("llm", *options, *quick, *more)


@pytest.mark.parametrize("endpoint", ["grpc", "openai"])
def test_result_on_stdout_and_progress_on_stderr(llm: FakeLlm, tmp_path: Path, endpoint: str) -> None:
    llm.script = lambda number: Script()
    result = measure(
        llm, tmp_path, "--concurrency-range", "1:4:x2", "--goodput", "ttft:60000 e2e:60000", endpoint=endpoint
    )
    assert result.exit_code == 0, result.output
    assert f"fake over {endpoint}" in result.stdout and "closed loop, streamed" in result.stdout
    assert "concurrency 4" in result.stderr and f"report: {tmp_path / 'llm.html'}" in result.stderr
    assert (tmp_path / "llm.html").read_text().startswith("<!doctype html>")
    shown = perf_report("show", tmp_path / "llm.json")
    assert shown.stdout == result.stdout
    assert perf_report("show", tmp_path / "llm.json", "--json").stdout == (tmp_path / "llm.json").read_text()


def test_json_is_the_only_thing_on_stdout(llm: FakeLlm, tmp_path: Path) -> None:
    llm.script = lambda number: Script()
    options = ("--request-rate-range", "200", "--repeats", "2", "--json", "--shared-prefix", "64:0.5")
    report = llm_report_from_document(json.loads(measure(llm, tmp_path, *options).stdout), "stdout")
    (level,) = report.levels
    assert (level.load, [one.output_tokens for one in level.measurements]) == ("200 requests/s, poisson", [24, 24])
    assert "50% after one of 1 shared prefixes of 64" in report.subject.prompts


def test_every_request_failed_ends_with_1_and_keeps_the_report(llm: FakeLlm, tmp_path: Path) -> None:
    llm.script = lambda number: Script(error="no")
    result = measure(llm, tmp_path)
    assert result.exit_code == 1 and "6 x error event 500: no" in result.stdout
    assert (tmp_path / "llm.html").exists()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-m", "nope"), "no model 'nope' at {address}; its models: fake, other"),
        (("-x", "3"), "the OpenAI API has no versions"),
        (("--concurrency-range", "1", "--request-rate-range", "1"), "give one of them"),
        (("--input-tokens", "uniform:3"), "--input-tokens is 'uniform:3'; allowed"),
        (("--output-tokens", "0"), "--output-tokens '0' is out of range"),
        (("--shared-prefix", "9"), "--shared-prefix is '9'"),
        (("--token-ids", "9"), "--token-ids is '9'"),
        (("--goodput", "request_latency:5"), "allowed: ttft, tpot, e2e"),
        (("--goodput", "ttft:5", "--no-stream"), "--goodput ttft needs a stream"),
        (("-u", "127.0.0.1"), "'127.0.0.1' is not allowed; allowed: host:port"),
        (("-u", "https://127.0.0.1:9000"), "has the scheme 'https'"),
        (("--endpoint", "grpc", "-u", "https://127.0.0.1:8001"), "has the scheme 'https'"),
        (("--duration", "nan"), "'nan' is not a finite number"),
        (("--duration", "inf"), "'inf' is not a finite number"),
        (("--timeout", "nan"), "'nan' is not a finite number"),
        (("--output-dir", "/proc/nope"), "--output-dir /proc/nope"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_allowed(
    llm: FakeLlm, tmp_path: Path, options: tuple[str, ...], part: str
) -> None:
    llm.seen.clear()
    result = measure(llm, tmp_path, *options)
    assert result.exit_code == 2
    assert part.format(address=llm.http) in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr and llm.seen == []


def test_two_runs_of_a_seed_send_the_same_prompts_and_share_no_cache(llm: FakeLlm, tmp_path: Path) -> None:
    """A second run would find its prompts in the server's prefix cache, and tell a time to the first token of hits."""
    llm.script = lambda number: Script()
    runs = []
    for _ in range(2):
        llm.seen.clear()
        assert measure(llm, tmp_path).exit_code == 0
        runs.append(([one.request["prompt"] for one in llm.seen], {one.request["cache_salt"] for one in llm.seen}))
    (prompts, salts), (same_prompts, other_salts) = runs
    assert prompts == same_prompts and len(prompts) == 6
    assert len(salts) == len(other_salts) == 1 and salts != other_salts


def test_a_cache_salt_goes_to_models_that_take_one() -> None:
    request = LlmRequest((1, 2), 3)
    for inputs, sent in (({"input_ids"}, []), ({"input_ids", "cache_salt"}, ["cache_salt"])):
        payload = grpc_payload(request, Asking("m", inputs=frozenset(inputs), salt="abc"))
        names = [tensor.name for tensor in service_pb2.ModelInferRequest.FromString(payload).inputs]
        assert [name for name in names if name == "cache_salt"] == sent


def test_no_server_ends_with_3(tmp_path: Path) -> None:
    result = perf_report("llm", "-m", "x", "-u", "127.0.0.1:9", "--endpoint", "openai", "--output-dir", tmp_path)
    assert result.exit_code == 3 and len(result.stderr.splitlines()) == 1
