"""`perf-report llm`: options in, a report and an exit code out."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from perf.console import make_folder, show_progress, write_files
from perf.environment import describe_environment
from perf.errors import UsageError
from perf.finite_range import FiniteRange
from perf.json_form import to_json
from perf.llm.html import render_llm_html
from perf.llm.lengths import parse_lengths
from perf.llm.measurement import LlmSettings
from perf.llm.metrics import LIMITS
from perf.llm.prompts import PROMPT_KINDS, PromptOptions, parse_shared_prefix, parse_token_ids
from perf.llm.report import measure_llm
from perf.llm.session import ENDPOINTS, LlmQuestion, open_llm_session
from perf.llm.text import print_llm_report
from perf.load_generator import read_address
from perf.load_options import load_options
from perf.metrics import parse_limits
from perf.options import read_loads

_PORTS = {"grpc": 8001, "openai": 9000}

_EPILOG = """\b
Examples:
  Closed loop over Triton's gRPC stream, 1, 8 and 32 streams:
    perf-report llm -m chat --concurrency-range 1,8,32
  Open loop over the OpenAI API, Poisson arrivals at 2 to 6 requests/s,
  share within 500 ms to the first token and 50 ms for each further one:
    perf-report llm -m chat --endpoint openai --request-rate-range 2:6:2 \\
        --input-tokens uniform:16:256 --output-tokens uniform:8:128 \\
        --goodput "ttft:500 tpot:50"
  Half of the prompts after one of four shared prefixes of 512 tokens:
    perf-report llm -m chat --shared-prefix 512:0.5:4 --input-tokens 32
  Two reports side by side:
    perf-report compare before/llm.json after/llm.json
"""


@click.command(epilog=_EPILOG)
@click.option("-m", "--model-name", required=True, help="Language model to measure.")
@click.option("-x", "--model-version", default="", help="Its version, on Triton.  [default: the server's choice]")
@click.option("-u", "--url", help="host:port of the server.  [default: 127.0.0.1:8001, for openai 127.0.0.1:9000]")
@click.option(
    "--endpoint",
    type=click.Choice(ENDPOINTS),
    default="grpc",
    show_default=True,
    help="Triton's gRPC stream, or the OpenAI API of any server (with $OPENAI_API_KEY, where it is set).",
)
@load_options("poisson")
@click.option(
    "--input-tokens",
    default="128",
    show_default=True,
    metavar="LENGTHS",
    help="Of prompts: N, uniform:LOW:HIGH or lognormal:MEAN:STDDEV.",
)
@click.option(
    "--output-tokens", default="64", show_default=True, metavar="LENGTHS", help="Of answers, in the same way."
)
@click.option(
    "--shared-prefix",
    metavar="LENGTH:SHARE[:COUNT]",
    help="SHARE of the prompts begin with one of COUNT prefixes of LENGTH tokens.",
)
@click.option(
    "--prompts",
    type=click.Choice(PROMPT_KINDS),
    default="tokens",
    show_default=True,
    help="Token ids; words, one for each token asked for; the same as a user's message (openai).",
)
@click.option("--token-ids", default="1000:30000", show_default=True, metavar="LOW:HIGH", help="That prompts are of.")
@click.option("--stop-at-eos", is_flag=True, help="Let the model end its answers; else they have the length asked for.")
@click.option("--no-stream", is_flag=True, help="Ask for whole answers: no TTFT, TPOT and ITL then.")
@click.option("--duration", type=FiniteRange(0, min_open=True), default=30.0, show_default=True, help="Of a level, s.")
@click.option("--request-count", type=click.IntRange(1), help="Send exactly so many per level, whatever the duration.")
@click.option(
    "--warmup-request-count",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Requests to send and forget before each level.",
)
@click.option("--goodput", multiple=True, metavar="NAME:MS", help=f"Limits of a good request: {', '.join(LIMITS)}.")
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Report median and spread.")
@click.option("--random-seed", type=click.IntRange(0), default=0, show_default=True, help="For prompts and arrivals.")
@click.option(
    "--timeout", type=FiniteRange(0, min_open=True), default=300.0, show_default=True, help="Of one request, s."
)
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("perf_report"),
    show_default=True,
    help="For llm.json and llm.html.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
@click.pass_context
def llm(context: click.Context, /, **options: Any) -> None:
    """Measure a language model: time to first token, time per token, tokens/s, goodput.

    Every prompt is new, so that no cache answers for the model, but for --shared-prefix;
    what an earlier run left in the server's prefix cache is not found either (`cache_salt`).
    """
    loads = read_loads(options)
    settings = _settings(options)
    question = _question(options)
    make_folder(options["output_dir"])
    session = open_llm_session(question)
    with show_progress(len(loads) * settings.repeats) as say:
        report = measure_llm(
            session.subject,
            session.wire,
            session.payloads,
            loads,
            settings,
            environment=describe_environment(question.address),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=shlex.join(["perf-report", *sys.argv[1:]]),
            progress=say,
        )
    folder = options["output_dir"]
    write_files({folder / "llm.json": to_json(report), folder / "llm.html": render_llm_html(report)})
    if options["as_json"]:
        click.echo(to_json(report), nl=False)
    else:
        print_llm_report(report, Console())
    click.echo(f"report: {folder / 'llm.html'}", err=True)
    context.exit(1 if report.all_failed else 0)


def _settings(options: Mapping[str, Any]) -> LlmSettings:
    limits = parse_limits(options["goodput"], LIMITS)
    if options["no_stream"] and (needing := sorted(limits.keys() & {"ttft", "tpot"})):
        raise UsageError(f"--goodput {needing[0]} needs a stream, and --no-stream was given; allowed: e2e")
    return LlmSettings(
        duration_s=options["duration"],
        request_count=options["request_count"],
        warmup_requests=options["warmup_request_count"],
        goodput_limits_ms=limits,
        repeats=options["repeats"],
        streamed=not options["no_stream"],
        timeout_s=options["timeout"],
    )


def _question(options: Mapping[str, Any]) -> LlmQuestion:
    endpoint = options["endpoint"]
    url = options["url"] or f"127.0.0.1:{_PORTS[endpoint]}"
    address = read_address(url.removesuffix("/").removesuffix("/v1"))  # as `compile serve` prints it
    prefix = options["shared_prefix"]
    return LlmQuestion(
        model=options["model_name"],
        endpoint=endpoint,
        address=address,
        prompts=PromptOptions(
            kind=options["prompts"],
            input_lengths=parse_lengths(options["input_tokens"], "--input-tokens"),
            output_lengths=parse_lengths(options["output_tokens"], "--output-tokens"),
            prefix=None if prefix is None else parse_shared_prefix(prefix),
            token_ids=parse_token_ids(options["token_ids"]),
            ignore_eos=not options["stop_at_eos"],
            seed=options["random_seed"],
        ),
        version=options["model_version"],
        streamed=not options["no_stream"],
        timeout_s=options["timeout"],
        api_key=os.environ.get("OPENAI_API_KEY"),
        salt=secrets.token_hex(8),
    )
