"""Layers that are written one after another: axes at one place of alike layers are one dim.

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
    """Make one dim of the axes at one place of arguments that differ in a single number of their paths."""
    for group in _alike(leaves):
        for place in range(len(group[0].var.axes)):
            factors = [axes.dims(leaf.var.axes[place]) for leaf in group]
            if len({tuple([d.size for d in dims]) for dims in factors}) == 1:
                for dims in zip(*factors, strict=True):
                    _tie(axes, dims)


def _alike(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Arguments of one shape and dtype whose paths differ in one number, a group for each number of a path."""
    groups: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        words = leaf.path.split(".")
        for n, word in enumerate(words[1:], 1):  # the first is the name of the function's argument
            numbered = NUMBERED.match(word)
            if numbered is not None and len(leaf.var.axes) == len(leaf.var.shape):
                pattern = (*words[:n], numbered[1], n, *words[n + 1 :])
                groups.setdefault((pattern, leaf.var.shape, leaf.var.dtype, leaf.variable), []).append(leaf)
    return (group for group in groups.values() if len(group) > 1)


def _tie(axes: Axes, dims: Sequence[Axis]) -> None:
    """Make several dims one, unless two of them stand beside each other in a tensor, or have different names."""
    roots = list(dict.fromkeys(map(axes.find, dims)))
    spaces = [space for root in roots for space in root.holders]
    if len(spaces) == len(set(spaces)) and len({root.name for root in roots if root.name is not None}) < 2:
        for root in roots[1:]:
            axes.tie(roots[0], root)
