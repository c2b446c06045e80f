"""The `perf-report` command: options in, a report and an exit code out. Measures nothing itself."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from json import dumps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from perf.comparison import compare
from perf.console import make_folder, show_progress, write_files
from perf.csv import render_csv
from perf.environment import describe_environment
from perf.errors import PerfError, UsageError
from perf.finite_range import FiniteRange
from perf.html import render_html
from perf.json_form import document_from_json, read_text, report_from_document, schema_of, to_json
from perf.llm.cli import llm
from perf.llm.comparison import compare_llm
from perf.llm.report import LLM_SCHEMA, LlmReport, llm_report_from_document
from perf.llm.text import print_llm_report
from perf.load_generator import PROTOCOLS, Target, read_address
from perf.load_options import load_options
from perf.options import read_loads, read_settings, read_shapes
from perf.report import SCHEMA, Report, measure
from perf.session import Question, open_session
from perf.text import comparison_rows, print_report, print_table
from perf.workload import GeneratorOptions

_PORTS = {"grpc": 8001, "http": 8000}

_EPILOG = """\b
Exit codes: 0 done; 1 unstable, or every request failed (the report is written);
2 wrong usage; 3 no server at the address.
"""


class _Commands(click.Group):
    """Turns every `PerfError` into one line on stderr and its exit code; `--debug` lets the trace through."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PerfError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option("--debug", is_flag=True, help="Show the stack trace of an error.")
def main(debug: bool) -> None:
    """Measure models on a Triton server: latency, throughput, goodput, and where the time goes.

    \b
    Examples:
      perf-report run -m text_embedding --concurrency-range 1:16:x4
      perf-report llm -m chat --concurrency-range 1:16:x4
      perf-report show perf_report/report.json
      perf-report compare before/report.json after/report.json
    """


_RUN_EPILOG = """\b
Examples:
  Closed loop, 1, 4 and 16 requests in flight:
    perf-report run -m text_embedding --concurrency-range 1:16:x4
  Open loop, 100 to 500 requests/s, Poisson arrivals, share within 50 ms:
    perf-report run -m text_embedding --request-rate-range 100:500:100 \\
        --request-distribution poisson --goodput request_latency:50
  Dynamic dimensions, batches of 8, over HTTP:
    perf-report run -m text_embedding -i http -b 8 \\
        --shape input_ids:128 --shape attention_mask:128
  Your own inputs, five repeats, JSON for a script:
    perf-report run -m text_embedding --input-data inputs.json --repeats 5 --json
"""


@main.command(epilog=_RUN_EPILOG)
@click.option("-m", "--model-name", required=True, help="Model to measure.")
@click.option("-x", "--model-version", default="", help="Its version.  [default: the server's choice]")
@click.option("-u", "--url", help="host:port of the server.  [default: 127.0.0.1:8001, for http 127.0.0.1:8000]")
@click.option("-i", "--protocol", type=click.Choice(PROTOCOLS), default="grpc", show_default=True)
@click.option("-b", "--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Per request.")
@load_options("constant")
@click.option(
    "-p",
    "--measurement-interval",
    type=click.IntRange(1),
    default=5000,
    show_default=True,
    help="Length of a window, ms.",
)
@click.option(
    "-s",
    "--stability-percentage",
    type=FiniteRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="Stable when the last three windows lie within this of their average.",
)
@click.option(
    "-r",
    "--max-trials",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Windows at most, per level.",
)
@click.option(
    "--warmup-request-count",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Requests to send and forget before each level.",
)
@click.option(
    "--request-count", type=click.IntRange(1), help="Send exactly so many per level; stability is not judged."
)
@click.option(
    "--percentile",
    type=FiniteRange(0, 100, min_open=True),
    help="Judge stability by this percentile.  [default: the mean]",
)
@click.option(
    "--input-data",
    default="random",
    show_default=True,
    metavar="random|zero|FILE",
    help="Made-up inputs, or a JSON file in perf_analyzer's format.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="NAME:D1,D2",
    help="Dynamic dimensions of an input, without the batch. May be repeated.",
)
@click.option("--string-data", help="This text for every element of a BYTES input.")
@click.option("--string-length", type=click.IntRange(0), default=128, show_default=True, help="Of random text.")
@click.option("--random-seed", type=click.IntRange(0), default=0, show_default=True, help="For inputs and arrivals.")
@click.option(
    "--goodput",
    multiple=True,
    metavar="NAME:MS",
    help='Limits that a good request meets, as "request_latency:50".',
)
@click.option("--repeats", type=click.IntRange(1), default=1, show_default=True, help="Report median and spread.")
@click.option(
    "-f",
    "--latency-report-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the CSV here.",
)
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("perf_report"),
    show_default=True,
    help="For report.json, report.csv and report.html.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
@click.pass_context
def run(context: click.Context, /, **options: Any) -> None:
    """Measure a model under load."""
    loads = read_loads(options)
    settings = read_settings(options)
    target = Target(read_address(options["url"] or f"127.0.0.1:{_PORTS[options['protocol']]}"), options["protocol"])
    make_folder(options["output_dir"])
    question = Question(
        model=options["model_name"],
        target=target,
        version=options["model_version"],
        batch_size=options["batch_size"],
        input_data=options["input_data"],
        generator=GeneratorOptions(
            shapes=read_shapes(options["shapes"]),
            string_data=options["string_data"],
            string_length=options["string_length"],
            seed=options["random_seed"],
        ),
    )
    with open_session(question) as session, show_progress(len(loads) * settings.repeats) as say:
        report = measure(
            session.subject,
            target,
            session.workload,
            loads,
            settings,
            environment=describe_environment(target.address),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=shlex.join(["perf-report", *sys.argv[1:]]),
            counters=session.counters,
            progress=say,
        )
    folder, extra_csv = options["output_dir"], options["latency_report_file"]
    csv = render_csv(report)
    files = {folder / "report.json": to_json(report), folder / "report.csv": csv}
    write_files({**files, folder / "report.html": render_html(report), **({extra_csv: csv} if extra_csv else {})})
    if options["as_json"]:
        click.echo(to_json(report), nl=False)
    else:
        print_report(report, Console())
    click.echo(f"report: {folder / 'report.html'}", err=True)
    context.exit(1 if report.all_failed or report.unstable else 0)


@main.command(epilog="Example: perf-report show perf_report/report.json")
@click.argument("report", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and nothing else.")
def show(report: Path, as_json: bool) -> None:
    """Print a report that was written before."""
    found = _read(report)
    if as_json:
        click.echo(to_json(found), nl=False)
    elif isinstance(found, LlmReport):
        print_llm_report(found, Console())
    else:
        print_report(found, Console())


@main.command(name="compare", epilog="Example: perf-report compare before/report.json after/report.json")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON, and nothing else.")
def compare_command(old: Path, new: Path, as_json: bool) -> None:
    """Compare two reports level by level: NEW / OLD.

    The interval of a figure spans its repeats, that of a throughput without repeats its last three windows.
    Where the intervals overlap, the difference may be chance; measure with --repeats 5 to know more.
    """
    before, after = _read(old), _read(new)
    if isinstance(before, LlmReport) and isinstance(after, LlmReport):
        comparison = compare_llm(before, after)
    elif isinstance(before, Report) and isinstance(after, Report):
        comparison = compare(before, after)
    else:
        raise UsageError(f"{old} and {new} are reports of `run` and of `llm`; compare two of one kind")
    if as_json:
        click.echo(dumps(asdict(comparison), indent=2))
        return
    console = Console()
    print_table(console, comparison_rows(comparison))
    for difference in comparison.differences:
        click.echo(f"differs: {difference}")


def _read(path: Path) -> Report | LlmReport:
    """A report of either kind."""
    document = document_from_json(read_text(path), str(path))
    if schema_of(document) == LLM_SCHEMA:
        return llm_report_from_document(document, str(path))
    found: Report = report_from_document(Report, SCHEMA, document, str(path))
    return found


main.add_command(llm)

if __name__ == "__main__":
    main()
