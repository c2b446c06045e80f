"""How many prompts of one request run at once."""

from __future__ import annotations

import asyncio

from clients.openai_server.turns import Turns


def _run(num_prompts: int, at_once: int, room: int) -> tuple[int, int, int]:
    """Prompts in a queue with so much room; returns how many were answered, refusals, and the most at once."""

    async def run() -> tuple[int, int, int]:
        turns, inside, refusals, most = Turns(at_once), 0, 0, 0

        async def one() -> bool:
            nonlocal inside, refusals, most
            while True:
                await turns.begin()
                try:
                    if inside == room:
                        refusals += 1
                        if not turns.fewer():
                            return False
                        continue
                    inside += 1
                    most = max(most, inside)
                    await asyncio.sleep(0)
                    inside -= 1
                    return True
                finally:
                    turns.end()

        answered = sum(await asyncio.gather(*(one() for _ in range(num_prompts))))
        return answered, refusals, most

    return asyncio.run(asyncio.wait_for(run(), 10))


def test_no_more_than_are_allowed_run_at_once() -> None:
    assert _run(20, at_once=4, room=100) == (20, 0, 4)


def test_what_was_refused_comes_when_another_has_ended() -> None:
    assert _run(20, at_once=8, room=3) == (20, 5, 3)


def test_one_turn_is_left_always() -> None:
    assert _run(20, at_once=8, room=1) == (20, 7, 1)


def test_a_prompt_that_runs_alone_is_refused() -> None:
    assert _run(1, at_once=1, room=0) == (0, 1, 0)
    assert _run(3, at_once=3, room=0)[0] == 0
