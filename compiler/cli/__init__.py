"""The `compile` command: arguments in, exit code and report out; one file per command. No logic of its own."""

from __future__ import annotations

import click

from compiler import __version__
from compiler.cli import build, cache, check, doctor, explain, kv_plan, llm, openai, pin, serve, verify
from compiler.cli.common import EXIT_CODES


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="compile")
def main() -> None:
    """From a PyTorch model to a served, measured NVIDIA Triton deployment.

    \b
    Examples:
      compile build ensembles/text_embedding        # every spec of a pipeline
      compile llm model.gguf --name chat            # a language model
      compile serve                                 # a real tritonserver on the repository
      compile check                                 # what Triton would refuse
      compile doctor                                # what this machine lacks
    """


for _module in (build, llm, serve, openai, pin, check, verify, explain, doctor, cache, kv_plan):
    main.add_command(_module.command)
