"""When what died is started again."""

from __future__ import annotations

import pytest

from compiler.restart_policy import Death, RestartPolicy


@pytest.mark.parametrize(
    ("deaths", "delay_s"),
    [
        ([(100.0, 50.0)], 0.0),  # it had served for a while
        ([(100.0, 2.0)], 0.0),
        ([(100.0, 1.9)], 0.5),  # it died as soon as it was ready
        ([(100.0, 0.1), (102.0, 0.1)], 1.0),
        ([(100.0, 0.1), (102.0, 0.1), (105.0, 0.0)], 2.0),
        ([(100.0, 0.1), (120.0, 9.0)], 0.0),  # the second time it served
        ([(100.0, 0.1), (120.0, 9.0), (121.0, 0.1)], 0.5),
        ([(100.0, 9.0), (110.0, 9.0), (120.0, 9.0), (130.0, 9.0)], None),  # the fourth within a minute
        ([(100.0, 9.0), (110.0, 9.0), (120.0, 9.0), (160.0, 9.0)], 0.0),  # the first is a minute ago
    ],
)
def test_the_delay(deaths, delay_s):
    assert RestartPolicy(max_restarts=3).delay_s([Death(*death) for death in deaths]) == delay_s


def test_the_delay_has_a_limit():
    deaths = [Death(100.0 * n, 0.0) for n in range(30)]
    assert RestartPolicy().delay_s(deaths) == 8.0


def test_no_restarts():
    assert RestartPolicy(max_restarts=0).delay_s([Death(5.0, 1000.0)]) is None
