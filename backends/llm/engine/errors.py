"""Why the engine does not take a request; a front end maps `code` to its own status."""

from __future__ import annotations


class RequestRefused(Exception):
    """The request cannot be served; nothing was changed.

    Attributes:
        code: "invalid" (never fits), "overloaded" (try again later) or "deadline" (cannot be met).
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
