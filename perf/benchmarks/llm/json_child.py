"""A process of a benchmark that answers JSON lines: one for a round, one back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any


class JsonChild:
    """A running child; `ready` is what it said when it was. Its end is the end of its input.

    Args:
        command: to be started.

    Raises:
        SystemExit: it ended without an answer, here and in `ask`.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def ask(self, work: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one line of work."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __enter__(self) -> JsonChild:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()  # its work is of no use any more
        self.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
