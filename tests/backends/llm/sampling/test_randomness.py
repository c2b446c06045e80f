"""Numbers by position: reproducible, uniform, unrelated between seeds, answers, positions and purposes."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llm.sampling.randomness import Purpose, seed_from_request_id, uniform


def test_the_numbers_are_the_same_on_every_machine_and_version() -> None:
    assert uniform(0, 0, 0, Purpose.TOKEN) == 0.5035555844408229
    assert seed_from_request_id("request-1") == 7239539881221587450


@pytest.mark.parametrize("changed", ["seed", "sample", "position", "purpose"])
def test_each_key_gives_uniform_numbers_that_are_unrelated_to_the_rest(changed: str) -> None:
    count = 20_000
    keys = {
        "seed": lambda i: (i, 0, 5, Purpose.TOKEN),
        "sample": lambda i: (7, i, 5, Purpose.TOKEN),
        "position": lambda i: (7, 0, i, Purpose.TOKEN),
        "purpose": lambda i: (7, 0, i, Purpose.ACCEPT),
    }
    numbers = np.array([uniform(*keys[changed](i)) for i in range(count)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    chi_squared = float(((counts - count / 20) ** 2 / (count / 20)).sum())
    assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001; the numbers are fixed, so this cannot flicker
    assert abs(float(np.corrcoef(numbers[:-1], numbers[1:])[0, 1])) < 0.03
    other = np.array([uniform(8, 0, i, Purpose.TOKEN) for i in range(count)])
    assert abs(float(np.corrcoef(numbers, other)[0, 1])) < 0.03
