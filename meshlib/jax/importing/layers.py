"""Unrolled layers: corresponding axes of equal layers become one dim.

The arguments "params.layers.0.wq", "params.layers.1.wq", ... differ in one number. Where they have the same shape, each
of their axes is one dim in all of them, so that one rule lays out all layers, which are then planned and listed as one
body. Axes that one tensor has side by side stay apart, as those of a chain of square matrices do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from meshlib.jax.importing.axes import Axes, Axis
from meshlib.jax.importing.naming import Leaf

NUMBERED = re.compile(r"^(.*?)(\d+)$")


def tie_layers(axes: Axes, leaves: Sequence[Leaf]) -> None:
    """Unify corresponding axes of arguments whose paths differ in a single number."""
    for group in _alike(leaves):
        for place in range(len(group[0].var.axes)):
            factors = [axes.dims(leaf.var.axes[place]) for leaf in group]
            if len({tuple([d.size for d in dims]) for dims in factors}) == 1:
                for dims in zip(*factors, strict=True):
                    _tie(axes, dims)


def _alike(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Groups of arguments of one shape and dtype whose paths differ in one number."""
    groups: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        words = leaf.path.split(".")
        for n, word in enumerate(words[1:], 1):  # words[0] is the name of the function's argument
            numbered = NUMBERED.match(word)
            if numbered is not None and len(leaf.var.axes) == len(leaf.var.shape):
                pattern = (*words[:n], numbered[1], n, *words[n + 1 :])
                groups.setdefault((pattern, leaf.var.shape, leaf.var.dtype, leaf.variable), []).append(leaf)
    return (group for group in groups.values() if len(group) > 1)


def _tie(axes: Axes, dims: Sequence[Axis]) -> None:
    """Unify several dims, unless two of them occur in one tensor or have different names."""
    roots = list(dict.fromkeys(map(axes.find, dims)))
    spaces = [space for root in roots for space in root.holders]
    if len(spaces) == len(set(spaces)) and len({root.name for root in roots if root.name is not None}) < 2:
        for root in roots[1:]:
            axes.tie(roots[0], root)
