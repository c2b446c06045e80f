"""WaitingRequests: who waits for a place in the steps, long prompts apart from short ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from backends.llm.engine.policies import Policy, Queue
from backends.llm.engine.request import Request


class WaitingRequests:
    """Two queues in the policy's order.

    Long prompts are computed one at a time. In one queue those that must wait for their turn would stand before short
    ones that need not.

    Args:
        is_long: of a request; its answer may not change while the request waits.
    """

    def __init__(self, policy: Policy, is_long: Callable[[Request], bool]) -> None:
        self._rank = policy.rank
        self._is_long = is_long
        self._short: Queue = policy.new_queue()
        self._long: Queue = policy.new_queue()

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Request]:
        yield from self._short
        yield from self._long

    def push(self, request: Request) -> None:
        self._queue_of(request).push(request)

    def remove(self, request: Request) -> None:
        self._queue_of(request).remove(request)

    def peek(self, *, take_long: bool) -> Request | None:
        """Returns who is to start next, a long one only where `take_long`; it stays in its queue."""
        heads = [self._short.peek()]
        if take_long:
            heads.append(self._long.peek())
        return min((head for head in heads if head is not None), key=self._rank, default=None)

    def _queue_of(self, request: Request) -> Queue:
        return self._long if self._is_long(request) else self._short


@dataclass(slots=True)
class StaticBatch:
    """Static batching, there to be compared with: places are filled when all of them are free, and not in between.

    Attributes:
        num_left: of the batch that is being filled; its prompts may take several steps.
    """

    num_left: int = 0

    def num_places(self, num_free: int, num_running: int, num_waiting: int) -> int:
        if not num_running:
            self.num_left = min(num_waiting, num_free)
        return min(num_free, self.num_left)
