"""Numbers on the command line: click takes `nan` in every range, and a configuration with it would be published."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from compiler.cli import main


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "words",
    [
        ("llm", "model.gguf", "--default-deadline-ms"),
        ("serve", ".", "--ready-timeout"),
        ("kv-plan", "--model", "model.gguf", "--memory", "1GiB", "--utilization"),
        ("kv-plan", "--model", "model.gguf", "--memory", "1GiB", "--weight-bits"),
    ],
)
def test_a_number_without_a_value_is_wrong_usage(words: tuple[str, ...], number: str) -> None:
    result = CliRunner().invoke(main, [*words, number])
    assert result.exit_code == 2
    assert f"{number!r} is not a finite number" in result.stderr or "is not in the range" in result.stderr
