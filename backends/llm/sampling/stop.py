"""StopMatcher: finds stop strings in text that comes in pieces, and holds back only what may become one.

An Aho-Corasick automaton reads each character once, whatever the number of stop strings:

    stops "abc", "bd"     root -a-> (a) -b-> (ab) -c-> stop "abc"
                          root -b-> (b) -d-> stop "bd"          (ab) fails to (b): "abd" is found too

The state is the longest end of the text that begins a stop string, so its length is exactly what must be held back.
What is found depends on the characters and not on the pieces: the stop that is complete first, the longest of those
that are complete at the same character.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class _Automaton:
    """The transitions of a set of stop strings; states are numbers, 0 is the root.

    Attributes:
        goto: for each state its children by character.
        fail: for each state that of its longest proper end that begins a stop string.
        found: for each state the longest stop string that ends there, or None.
        held: for each state how many of the last characters may still become a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.goto: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.found: list[str | None] = [None]
        self.held = [0]
        depth = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self.goto[state]:
                    self.goto[state][character] = len(self.goto)
                    self.goto.append({})
                    self.fail.append(0)
                    self.found.append(None)
                    self.held.append(0)
                    depth.append(depth[state] + 1)
                state = self.goto[state][character]
            self.found[state] = stop
        self._link(depth)

    def _link(self, depth: list[int]) -> None:
        """Fills in what follows from shorter states, breadth first."""
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            shorter = self.fail[state]
            self.found[state] = self.found[state] or self.found[shorter]
            # A state without children is a whole stop string: of it only an end can begin another.
            self.held[state] = depth[state] if self.goto[state] else self.held[shorter]
            for character, child in self.goto[state].items():
                self.fail[child] = self.step(shorter, character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Returns the state after one more character."""
        while state and character not in self.goto[state]:
            state = self.fail[state]
        return self.goto[state].get(character, 0)


@lru_cache(maxsize=16)  # up to a megabyte each
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)


class StopMatcher:
    """The text of one answer on its way out.

    Attributes:
        matched: the stop string that was found, or None.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        """
        Args:
            stops: strings that are not empty.
            include_stop: the text ends after the stop string instead of before it, so nothing needs to be held back.
        """
        self.matched: str | None = None
        self._automaton = _automaton(stops) if stops else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Reads the next piece of text.

        Args:
            text: may be empty.
            may_stop: False before `min_tokens`: a stop string that ends in this piece is text like any other.

        Returns:
            The text that can leave now; nothing more once a stop string was found.
        """
        if self.matched is not None:
            return ""
        if self._automaton is None:
            return text
        for index, character in enumerate(text):
            self._state = self._automaton.step(self._state, character)
            found = self._automaton.found[self._state]
            if found is not None and may_stop:
                return self._stop(found, text[: index + 1])
        if self._include_stop:
            return text
        text = self._held + text
        emitted = len(text) - self._automaton.held[self._state]
        self._held = text[emitted:]
        return text[:emitted]

    def flush(self) -> str:
        """Returns what was held back and, now that no more text comes, is no stop string."""
        held, self._held = self._held, ""
        return held

    def _stop(self, found: str, text: str) -> str:
        """Ends the text at a stop string, the last characters of `text`."""
        self.matched = found
        if self._include_stop:
            return text
        text = self.flush() + text
        return text[: len(text) - len(found)]
