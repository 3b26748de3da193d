"""Random meshes, shardings and rules for the property tests of this folder."""

from __future__ import annotations

from math import prod

from hypothesis import settings
from hypothesis import strategies as st

from layouts import LayoutRules, Mesh, Rule, Sharding
from tests.effort import draws

properties = settings(derandomize=True, deadline=None, max_examples=draws(60, 2000))


@st.composite
def meshes(draw, max_axes=3):
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=max_axes))
    return Mesh([("xyz"[i], size) for i, size in enumerate(sizes)])


@st.composite
def placements(draw, mesh, ndim):
    """Axes for each dim and axes left over, every axis used once."""
    order = draw(st.permutations(mesh.axes))
    entries, rest = [[] for _ in range(ndim)], []
    for axis in order:
        draw(st.sampled_from([*entries, rest])).append(axis)
    return tuple(map(tuple, entries)), rest


@st.composite
def shardings(draw, mesh=None, pending=True, count=1, kinds=("sum", "max", "min")):
    """`count` shardings of one shape on one mesh, of small sizes that divide."""
    mesh = mesh or draw(meshes())
    ndim = draw(st.integers(1, 3))
    placed = [draw(placements(mesh, ndim)) for _ in range(count)]
    sizes = [draw(st.integers(1, 3)) for _ in range(ndim)]
    for d in range(ndim):
        needed = {a for entries, _ in placed for a in entries[d]}
        sizes[d] *= prod(mesh.axis_size(a) for a in needed)
    shape = [("ABC"[d], size) for d, size in enumerate(sizes)]
    kind = draw(st.sampled_from(kinds))
    made = []
    for entries, rest in placed:
        awaited = draw(st.sets(st.sampled_from(rest))) if pending and rest else set()
        made.append(Sharding(shape, mesh, entries, [(a, kind) for a in awaited]))
    return made if count > 1 else made[0]


@st.composite
def layouts(draw):
    names = st.sampled_from(["batch", "d_model", "heads", "vocab"])
    scopes = st.sampled_from([None, None, "variables", "slots", "activations"])
    rules, required = [], set()
    for _ in range(draw(st.integers(0, 5))):
        dim, scope = draw(names), draw(scopes)
        axes = tuple(draw(st.permutations(["x", "y", "z"]))[: draw(st.integers(0, 3))])
        optional = bool(axes) and ((scope, dim) in required or draw(st.booleans()))
        if not optional and (scope, dim) in required:
            continue
        if not optional:
            required.add((scope, dim))
        whole = optional and len(axes) > 1 and draw(st.booleans())
        rules.append(Rule(dim, axes, optional, scope, whole))
    return LayoutRules(rules)
