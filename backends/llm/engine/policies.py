"""Who goes first: one policy for all requests of a scheduler, and the queues in which they wait."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request

Rank = tuple[int, ...]


class Queue(Protocol):
    """Waiting requests; the order is the policy's."""

    def push(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None: ...

    def peek(self) -> Request | None:
        """Returns who goes next, without taking it out."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class Policy(Protocol):
    """A total order over requests: the smallest rank goes first, the largest is preempted first."""

    def rank(self, request: Request) -> Rank: ...

    def new_queue(self) -> Queue: ...

    def added(self, request: Request) -> None:
        """Hears of each request that enters the engine."""
        ...

    def removed(self, request: Request) -> None:
        """Hears of each request that leaves it."""
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """Hears of all tokens that are scheduled."""
        ...


class OrderedQueue:
    """A heap for ranks that do not change while a request waits; removal marks, and the next peek throws away."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._rank = rank
        self._heap: list[tuple[Rank, Request]] = []
        self._requests: dict[RequestId, Request] = {}

    def push(self, request: Request) -> None:
        assert request.request_id not in self._requests, f"{request.request_id} waits already"
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (self._rank(request), request))

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        # Dead entries are at most as many as living ones, so that the memory does not grow with those that gave up.
        if len(self._heap) > 2 * len(self._requests) + 16:
            self._heap = [entry for entry in self._heap if self._alive(entry[1])]
            heapq.heapify(self._heap)

    def peek(self) -> Request | None:
        while self._heap and not self._alive(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def _alive(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request


class FirstComeFirstServed:
    """The order of arrival."""

    def rank(self, request: Request) -> Rank:
        return (request.arrival_ns, request.order)

    def new_queue(self) -> Queue:
        return OrderedQueue(self.rank)

    def added(self, request: Request) -> None: ...

    def removed(self, request: Request) -> None: ...

    def charge(self, request: Request, num_tokens: int) -> None: ...


class PriorityFirst(FirstComeFirstServed):
    """The smallest `priority`, then the order of arrival."""

    def rank(self, request: Request) -> Rank:
        return (request.priority, request.arrival_ns, request.order)


class LongestPrefixMatch(FirstComeFirstServed):
    """Most cached tokens first, so that a prefix is used before it is evicted.

    Args:
        num_cached_tokens: how many tokens of a request the cache holds now.
    """

    def __init__(self, num_cached_tokens: Callable[[Request], int]) -> None:
        self._num_cached_tokens = num_cached_tokens

    def new_queue(self) -> Queue:
        return PrefixQueue(self.rank, self._num_cached_tokens)


class PrefixQueue:
    """The longest cached prefix among the `WINDOW` first to arrive; after `MAX_OVERTAKEN` others the first of all."""

    WINDOW, MAX_OVERTAKEN = 32, 32

    def __init__(self, rank: Callable[[Request], Rank], num_cached_tokens: Callable[[Request], int]) -> None:
        self._rest = OrderedQueue(rank)
        self._window: list[Request] = []
        self._num_cached_tokens = num_cached_tokens
        self._overtaken = 0

    def push(self, request: Request) -> None:
        self._rest.push(request)

    def remove(self, request: Request) -> None:
        if request not in self._window:
            self._rest.remove(request)
            return
        self._overtaken = 0 if self._window[0] is request else self._overtaken + 1
        self._window.remove(request)

    def peek(self) -> Request | None:
        while len(self._window) < self.WINDOW and (request := self._rest.peek()) is not None:
            self._rest.remove(request)
            self._window.append(request)
        if not self._window or self._overtaken >= self.MAX_OVERTAKEN:
            return self._window[0] if self._window else None
        return max(self._window, key=self._num_cached_tokens)  # the first of equals

    def __len__(self) -> int:
        return len(self._window) + len(self._rest)

    def __iter__(self) -> Iterator[Request]:
        yield from self._window
        yield from self._rest


class Fair(FirstComeFirstServed):
    """The client that was served the fewest tokens first (Sheng et al., "Fairness in Serving LLMs", 2024).

    A client that comes back starts level with the least served one that is there: what it did not use is not saved up.
    """

    def __init__(self) -> None:
        self._served: Counter[str] = Counter()
        self._present: Counter[str] = Counter()

    def rank(self, request: Request) -> Rank:
        return (self._served[request.client], request.arrival_ns, request.order)

    def new_queue(self) -> Queue:
        return FairQueue(self)

    def added(self, request: Request) -> None:
        client = request.client
        if not self._present[client] and self._present.total() > 0:
            least = min(self._served[other] for other, count in self._present.items() if count)
            self._served[client] = max(self._served[client], least)
        self._present[client] += 1

    def removed(self, request: Request) -> None:
        self._present[request.client] -= 1
        if not self._present.total():
            # Nobody is there, so nobody is ahead: the table does not grow with the clients of yesterday.
            self._present.clear()
            self._served.clear()
        elif not self._present[request.client]:
            del self._present[request.client]
            self._prune()

    def charge(self, request: Request, num_tokens: int) -> None:
        self._served[request.client] += num_tokens

    def _prune(self) -> None:
        """Forgets absent clients that would start level anyway, once they are many."""
        if len(self._served) > 2 * len(self._present) + 1024:
            least = min(self._served[client] for client in self._present)
            self._served = Counter({c: n for c, n in self._served.items() if c in self._present or n > least})


class FairQueue:
    """One queue for each client; the head of the least served client goes next."""

    def __init__(self, policy: Fair) -> None:
        self._policy = policy
        self._queues: dict[str, OrderedQueue] = {}

    def push(self, request: Request) -> None:
        if request.client not in self._queues:
            self._queues[request.client] = OrderedQueue(lambda r: (r.arrival_ns, r.order))
        self._queues[request.client].push(request)

    def remove(self, request: Request) -> None:
        queue = self._queues[request.client]
        queue.remove(request)
        if not len(queue):
            del self._queues[request.client]

    def peek(self) -> Request | None:
        heads = [head for queue in self._queues.values() if (head := queue.peek()) is not None]
        return min(heads, key=self._policy.rank, default=None)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Request]:
        for queue in self._queues.values():
            yield from queue


def policy_named(name: str, num_cached_tokens: Callable[[Request], int]) -> Policy:
    """Returns the policy of a SchedulerConfig."""
    if name == "longest_prefix_match":
        return LongestPrefixMatch(num_cached_tokens)
    return {"fcfs": FirstComeFirstServed, "priority": PriorityFirst, "fair": Fair}[name]()
