"""Answers to unknown attributes of a type, and to unknown names of the package."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FEW = 20  # attributes listed in a message


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of a message about an unknown name."""
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


class Attributes:
    """A type whose unknown attributes are answered with what it has.

    >>> from hardware import Torus
    >>> try:
    ...     Torus((4, 4)).distanse
    ... except AttributeError as fault:
    ...     print(fault)
    Torus has no 'distanse'; did you mean 'distance'?
    """

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers report unknown names

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # protocols that probe for a method of this name
                raise AttributeError(name)
            known = [x for x in dir(self) if not x.startswith("_")]
            hint = nearest(name, known) or (f"; it has {', '.join(known)}" if len(known) <= FEW else "")
            raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}")


IN_MODULES = {  # what people look for in `hardware` itself -> where it is
    **dict.fromkeys(("SystolicArray", "Systolic", "Array", "run"), "hardware.MXU(rows, columns).run(weights, x)"),
    **{kind: f"hardware.ring_plans.{kind}, or hardware.ring_steps.ring_steps('{kind}', data)" for kind in COLLECTIVES},
    **dict.fromkeys(("film_of", "Film"), "hardware.films.film_of(plan, links)"),
    "Mesh": "layouts.Mesh",
    "Ring": "hardware.Torus((nodes,))",
}


def elsewhere(name: str) -> str:
    """The end of a message about an unknown name of the package.

    >>> elsewhere("SystolicArray"), elsewhere("Tours")
    ('; write hardware.MXU(rows, columns).run(weights, x)', "; did you mean 'Torus'?")
    """
    import hardware

    if name in IN_MODULES:
        return f"; write {IN_MODULES[name]}"
    public = [known for known in vars(hardware) if not known.startswith("_")]
    return nearest(name, public)
