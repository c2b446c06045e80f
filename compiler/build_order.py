"""The order of several builds: what an ensemble wires comes before it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compiler.errors import UsageError


def order_by_need(names: Sequence[str], needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the names so that each stands behind what it needs, otherwise in the order given.

    Args:
        names: what is to be ordered.
        needs: what each name needs; what is not among `names` is no concern here.

    Raises:
        UsageError: they need each other in a circle; the message has the path.
    """
    known = set(names)
    ordered: list[str] = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            circle = " -> ".join((*trail[trail.index(name) :], name))
            raise UsageError(
                f"the ensembles need each other in a circle: {circle}",
                hint="an ensemble is made of models that exist without it",
            )
        if name not in ordered:
            for need in needs.get(name, ()):
                if need in known:
                    visit(need, (*trail, name))
            ordered.append(name)

    for name in names:
        visit(name, ())
    return ordered
