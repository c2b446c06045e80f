"""Sizes and times as a person writes them: `4GiB`, `10ms`."""

from __future__ import annotations

import re

_BYTES = re.compile(r"(\d{1,12}(?:\.\d{1,12})?) ?(KiB|MiB|GiB|TiB)")
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s)")
_MS_IN = {"ms": 1.0, "s": 1000.0}
_BYTES_IN = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def bytes_from_text(text: str) -> int | None:
    """Returns the number of bytes of `512MiB` or `4GiB`; None where the text is not of that form."""
    match = _BYTES.fullmatch(text)
    return int(float(match[1]) * _BYTES_IN[match[2]]) if match else None


def shown_bytes(count: int) -> str:
    """Returns a size for a person, with the largest unit that gives at least 1."""
    for unit, size in reversed(_BYTES_IN.items()):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def ms_from_text(text: str) -> float | None:
    """Returns the milliseconds of `10ms`, `0.5ms` or `2s`; None where the text is not of that form."""
    match = _TIME.fullmatch(text)
    return float(match[1]) * _MS_IN[match[2]] if match else None
