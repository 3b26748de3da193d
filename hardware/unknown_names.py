"""Answers to unknown attributes of a type, and to unknown names of the package."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
FEW, SEVERAL = 20, 4  # attributes listed in a message: all of a type, those that contain a word
DRAWN = ("plot", "show", "draw", "display")


def nearest(name: str, names: Sequence[str]) -> str:
    """The end of a message about an unknown name: the closest one, or some that contain it.

    >>> nearest("hbm_byte", ["hbm_bytes", "mxu_rows"]), nearest("hbm", ["hbm_bytes", "mxu_rows"]), nearest("x", ["y"])
    ("; did you mean 'hbm_bytes'?", "; did you mean 'hbm_bytes'?", '')
    """
    word = str(name)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    close = close or [known for known in names if len(word) > 2 and word in known][:SEVERAL]
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


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
            hint = _picture_call(type(self), name) or nearest(name, known)
            hint = hint or (f"; it has {', '.join(known)}" if len(known) <= FEW else "")
            if name in DRAWN and hasattr(self, "_repr_html_"):
                hint += "; a notebook draws it as the last line of a cell"
            raise AttributeError(f"{type(self).__name__} has no {name!r}{hint}")


def _picture_call(owner: type, name: str) -> str:
    """The end of a message about a name by which people look for a picture: the call that draws it, or ""."""
    plot, word = getattr(owner, "plot", None), name.removeprefix("plot_").removesuffix("_plot")
    if plot is None:
        return ""
    if f'"{word}"' in (plot.__doc__ or "").partition("what: ")[2]:
        return f'; .plot(what="{word}") draws it'
    return "; .plot() draws it" if name in DRAWN else ""


IN_MODULES = {  # what people look for in `hardware` itself -> where it is
    **dict.fromkeys(("SystolicArray", "Systolic", "Array", "run"), "hardware.MXU(rows, columns).run(weights, x)"),
    **{kind: f"hardware.ring_plans.{kind}, or hardware.ring_steps.ring_steps('{kind}', data)" for kind in COLLECTIVES},
    **dict.fromkeys(("film_of", "Film"), "hardware.films.film_of(plan, links)"),
    **{f"ring_{kind}": f"hardware.ring_steps.ring_steps('{kind}', data)" for kind in COLLECTIVES},
    **dict.fromkeys(("roofline", "ridge"), "mtf.estimate(program, slice).roofline"),
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
