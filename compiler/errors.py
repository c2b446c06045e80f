"""Every error that a user can see: what is wrong, the value seen, what is allowed, what to do."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

_NOT_THE_USERS = (str(Path(__file__).parent), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "<")


class ModelkilnError(Exception):
    """Base of all errors that are shown without a stack trace.

    Attributes:
        exit_code: the process exit code (1 refused, 2 usage or spec, 3 environment).
        hint: what the user can do about it, or an empty string.
    """

    exit_code = 1
    kind = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.done: dict[str, object] = {}  # what a command finished before it failed, for its JSON result
        self.spec: Path | None = None  # what was being built
        self.parts: tuple[ModelkilnError, ...] = ()  # where several builds failed, each one's error

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Pickles, on their way between processes, would else call the class with the message alone.
        return _restored, (type(self), self.args, vars(self))

    def to_json(self) -> dict[str, object]:
        return {"kind": self.kind, "message": self.message, "hint": self.hint, "exit_code": self.exit_code}


def _restored(kind: type[ModelkilnError], args: tuple[object, ...], state: dict[str, object]) -> ModelkilnError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class ModelRefused(ModelkilnError):
    """The model cannot be shipped: it failed to export, lost parity or is not supported."""

    exit_code = 1
    kind = "refused"


class SpecError(ModelkilnError):
    """A spec file is wrong; the message starts with `file:line`."""

    exit_code = 2
    kind = "spec"


class UsageError(ModelkilnError):
    """The command was called with something that does not exist or does not fit."""

    exit_code = 2
    kind = "usage"


class RepositoryError(ModelkilnError):
    """The model repository holds something that Triton would refuse or quietly do wrong."""

    exit_code = 1
    kind = "repository"


class EnvironmentLacks(ModelkilnError):
    """This machine lacks something the command needs (a package, a port, a server)."""

    exit_code = 3
    kind = "environment"


def one_of(names: Iterable[str]) -> str:
    """Returns the names as a readable list of what is allowed."""
    return ", ".join(sorted(names)) or "nothing"


def did_you_mean(seen: str, allowed: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)` for the closest allowed name, or an empty string."""
    close = difflib.get_close_matches(seen, list(allowed), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def where_it_failed(error: BaseException) -> str:
    """Returns one line: the error and the innermost line of code outside installed packages."""
    text = " ".join(str(error).split())
    installed = sysconfig.get_path("purelib")
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((installed, "<")) and "/compiler/" not in f.filename
    ]
    place = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {text[:500]}{place}"


def user_frames(error: BaseException) -> str:
    """Returns the error's text and the user's own lines on the way to it, the innermost last."""
    text = " ".join(str(error).split())[:500]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_USERS)]
    lines = [f"\n  at {Path(f.filename).name}:{f.lineno} in {f.name}: {f.line}" for f in frames]
    return f"{type(error).__name__}: {text}" + "".join(lines)
