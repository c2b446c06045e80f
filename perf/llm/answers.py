"""One answer as it came: its chunks with their times and tokens. Pure; the two protocols are read elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.records import ErrorKind


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer: when it came, and how many tokens it brought."""

    at_ns: int
    tokens: int


@dataclass(frozen=True)
class Answer:
    """What a server said to one request.

    Attributes:
        chunks: those that brought text or tokens.
        input_tokens, cached_tokens: as the server counts them; None where it does not say.
        error: what went wrong; an answer with one is a failure, whatever came before.
        counted: how many tokens each chunk holds is known; otherwise they were spread over the chunks.
    """

    chunks: tuple[Chunk, ...] = ()
    input_tokens: int | None = None
    cached_tokens: int | None = None
    error: ErrorKind | None = None
    counted: bool = True

    @property
    def output_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


@dataclass(frozen=True)
class Piece:
    """One message of a stream.

    Attributes:
        has_text: it brought text.
        total: output tokens so far; None where the message does not say.
    """

    at_ns: int
    has_text: bool
    total: int | None


NO_USAGE = ErrorKind("no usage", "the server did not say how many tokens it made; chunks are not counted for tokens")


def chunks_of(pieces: Sequence[Piece]) -> tuple[tuple[Chunk, ...], bool] | None:
    """The pieces that bring something, with their tokens; and whether those of each are known.

    Where only the end says how many tokens there were, and there are not as many pieces with text, they are spread
    evenly. None where nothing says it.
    """
    totals = [piece.total for piece in pieces if piece.total is not None]
    if not totals:
        return None
    total = max(totals)
    told = [piece for piece in pieces if piece.has_text or piece.total is not None]
    contents = [piece for piece in pieces if piece.has_text] or told[-1:]
    # The last count may stand in a message of its own: then the text before it was not counted by itself.
    if all(piece.total is not None for piece in contents):
        return _counted(told), True
    shares = [total * (index + 1) // len(contents) - total * index // len(contents) for index in range(len(contents))]
    return tuple(Chunk(piece.at_ns, share) for piece, share in zip(contents, shares, strict=True)), total == len(
        contents
    )


def _counted(pieces: Sequence[Piece]) -> tuple[Chunk, ...]:
    chunks, before = [], 0
    for piece in pieces:
        assert piece.total is not None
        if piece.has_text or piece.total > before:
            chunks.append(Chunk(piece.at_ns, max(0, piece.total - before)))
            before = max(before, piece.total)
    return tuple(chunks)
