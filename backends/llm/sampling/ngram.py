"""Drafts by prompt lookup: what followed the last tokens where they stood before. No model, and no rescan of the text.

    ... the quick brown fox ... the quick | brown fox      the longest earlier match of the end, then what came after it
        ---------                --------   ^^^^^^^^^

An index of hash chains (as LZ77 compressors have them) gives the earlier places of the last tokens, newest first; a few
of them are compared, so the work of a step is bounded whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.llm.engine.outputs import RequestId
from backends.llm.sampling.proposer import NO_DRAFT, Draft

MIN_MATCH = 2  # one equal token says too little
MAX_MATCH = 16  # tokens compared at one place
MAX_PLACES = 8  # places compared


class NgramIndex:
    """The tokens of one text, and where each pair of them stood."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}  # n-gram -> the place after its newest occurrence
        self._earlier: dict[int, int] = {}  # place -> the place after the occurrence before

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens; an n-gram enters the index with the token that follows it, so every place has a continuation."""
        tokens = self._tokens
        for token_id in token_ids:
            place = len(tokens)
            if place >= MIN_MATCH:
                ngram = tuple(tokens[-MIN_MATCH:])
                earlier = self._newest.get(ngram)
                if earlier is not None:
                    self._earlier[place] = earlier
                self._newest[ngram] = place
            tokens.append(token_id)

    def propose(self, count: int) -> tuple[int, ...]:
        """Returns the `count` tokens that may come next, or none where the last tokens are new.

        A match that reaches the end of the text is a loop: the draft goes on with its own tokens.
        """
        best, longest = 0, 0
        place = self._newest.get(tuple(self._tokens[-MIN_MATCH:]))
        for _ in range(MAX_PLACES):
            if place is None or longest == MAX_MATCH:
                break
            length = self._match(place)
            if length > longest:
                best, longest = place, length
            place = self._earlier.get(place)
        if not longest:
            return ()
        size = len(self._tokens)
        draft: list[int] = []
        for source in range(best, best + count):
            draft.append(self._tokens[source] if source < size else draft[source - size])
        return tuple(draft)

    def _match(self, place: int) -> int:
        """Returns how many tokens before the place equal the last ones of the text."""
        tokens = self._tokens
        length = 0
        while length < min(MAX_MATCH, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class NgramProposer:
    """Proposes what followed the same tokens earlier in the prompt or the answer; good where an answer repeats them."""

    def __init__(self) -> None:
        self._indexes: dict[RequestId, NgramIndex] = {}

    def add(self, request_id: RequestId, prompt_token_ids: Sequence[int]) -> None:
        """Indexes a prompt, once."""
        index = self._indexes[request_id] = NgramIndex()
        index.append(prompt_token_ids)

    def append(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Takes note of the next tokens of the answer."""
        self._indexes[request_id].append(token_ids)

    def propose(self, num_drafts: Mapping[RequestId, int]) -> dict[RequestId, Draft]:
        """Returns a draft for each request, empty where the last tokens are new."""
        drafts = {}
        for request_id, count in num_drafts.items():
            token_ids = self._indexes[request_id].propose(count) if count > 0 else ()
            drafts[request_id] = Draft(token_ids) if token_ids else NO_DRAFT
        return drafts

    def remove(self, request_id: RequestId) -> None:
        """Forgets a request, also one that is not known."""
        self._indexes.pop(request_id, None)

    def close(self) -> None:
        """Has nothing to free but the texts."""
        self._indexes.clear()
