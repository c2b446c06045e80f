"""The help texts, pinned: a change to what users type is made on purpose, with UPDATE_SNAPSHOTS=1."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from compiler.cli import main as compile_main
from perf.cli import main as perf_main

SNAPSHOTS = Path(__file__).parent / "snapshots"
COMMANDS: list[tuple[str, click.Group, list[str]]] = [("compile", compile_main, []), ("perf-report", perf_main, [])]
COMMANDS += [("compile", compile_main, [name]) for name in sorted(compile_main.commands)]
COMMANDS += [("perf-report", perf_main, [name]) for name in sorted(perf_main.commands)]


@pytest.mark.parametrize(("program", "command", "words"), COMMANDS, ids=[" ".join([p, *w]) for p, _, w in COMMANDS])
def test_help_is_as_pinned(program: str, command: click.Group, words: list[str]) -> None:
    result = CliRunner().invoke(command, [*words, "--help"], prog_name=program, terminal_width=100)
    assert result.exit_code == 0
    path = SNAPSHOTS / ("_".join([program, *words]) + ".txt")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(result.output)
    assert result.output == path.read_text()
    assert "Example" in result.output or len(words) == 0 or words == ["doctor"]


@pytest.mark.parametrize(("program", "command"), [("compile", compile_main), ("perf-report", perf_main)])
def test_an_unknown_command_exits_2(program: str, command: click.Group) -> None:
    assert CliRunner().invoke(command, ["no-such-command"], prog_name=program).exit_code == 2
