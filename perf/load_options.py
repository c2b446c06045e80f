"""The options of a load on the command line, which `perf-report run` and `perf-report llm` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from perf.arrivals import DISTRIBUTIONS
from perf.finite_range import FiniteRange

Command = TypeVar("Command", bound=Callable[..., Any])


def load_options(distribution: str) -> Callable[[Command], Command]:
    """The options that say how much is sent, and when: the same for every kind of model.

    Args:
        distribution: of arrivals, where none is asked for.
    """
    options = (
        click.option(
            "--concurrency-range",
            metavar="START:END:STEP",
            help="Closed loop: requests in flight. STEP is added, xK multiplies; or a list, 1,8,32.  [default: 1]",
        ),
        click.option(
            "--request-rate-range", metavar="START:END:STEP", help="Open loop: requests per second, on time or late."
        ),
        click.option(
            "--request-distribution",
            type=click.Choice(DISTRIBUTIONS),
            default=distribution,
            show_default=True,
            help="Of the gaps between requests, in an open loop.",
        ),
        click.option(
            "--burstiness",
            type=FiniteRange(0, min_open=True),
            default=1.0,
            show_default=True,
            help="With gamma: below 1 in bursts, 1 is poisson, above 1 more even.",
        ),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add
