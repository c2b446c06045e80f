"""Who waits: short and long prompts apart, each in the policy's order."""

from __future__ import annotations

import pytest

from backends.llm.engine.outputs import RequestId
from backends.llm.engine.policies import FirstComeFirstServed, PriorityFirst
from backends.llm.engine.request import Request
from backends.llm.engine.waiting import WaitingRequests


def request(name, num_tokens, **fields):
    return Request(RequestId(name), tuple(range(num_tokens)), 4, **fields)


def waiting(*requests, policy=None):
    found = WaitingRequests(policy or FirstComeFirstServed(), lambda r: r.num_tokens > 8)
    for order, each in enumerate(requests):
        each.order = order
        found.push(each)
    return found


def test_a_long_prompt_that_may_not_start_does_not_hold_up_a_short_one_behind_it():
    long, short = request("long", 9), request("short", 8)
    queues = waiting(long, short)
    assert queues.peek(take_long=False) is short
    assert queues.peek(take_long=True) is long  # it came first
    queues.remove(short)
    assert queues.peek(take_long=False) is None and queues.peek(take_long=True) is long


def test_the_policy_decides_between_the_two_queues():
    low, high = request("low", 3, priority=5), request("high", 30, priority=1)
    queues = waiting(low, high, policy=PriorityFirst())
    assert queues.peek(take_long=True) is high and queues.peek(take_long=False) is low


def test_all_that_wait_are_counted_and_seen_until_they_are_removed():
    requests = [request("a", 3), request("b", 20), request("c", 5)]
    queues = waiting(*requests)
    assert len(queues) == 3 and {r.request_id for r in queues} == {"a", "b", "c"}
    queues.remove(requests[1])
    assert [r.request_id for r in queues] == ["a", "c"] and len(queues) == 2
    with pytest.raises(KeyError):
        queues.remove(requests[1])
