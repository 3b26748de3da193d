"""Lookups with a known inverse: values and gradients equal those of `gather`, under random layouts too."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from meshlib.ops.movement.inverse_lookup import gather_places, gather_with_inverse
from tests.effort import draws
from tests.oracle import draw_layout, run

D = mtf.Dimension
GROUPS, TOKENS, CHOICES, WIDE = D("g", 2), D("t", 4), D("k", 2), D("d", 4)
LAYOUTS = 10  # of each draw
OUTER, INNER, PLACES = D("e", 4), D("p", 4), D("places", 16)


@pytest.mark.parametrize("seed", range(draws(3, 50)))
def test_values_and_gradients_equal_those_of_a_gather(seed: int) -> None:
    rng = np.random.default_rng(seed)
    free = np.stack([rng.permutation(PLACES.size)[: TOKENS.size * CHOICES.size] for _ in range(GROUPS.size)])
    slot = free.reshape(GROUPS.size, CHOICES.size, TOKENS.size)
    slot[rng.random(slot.shape) < 0.2] = PLACES.size  # some choices have no place
    token = np.full((GROUPS.size, PLACES.size + 1), -1)
    for g, k, t in np.ndindex(slot.shape):
        token[g, slot[g, k, t]] = t
    token[:, -1] = -1
    by_place = token[:, :-1].reshape(GROUPS.size, OUTER.size, INNER.size).transpose(1, 0, 2)
    with mtf.Graph():
        x = mtf.variable("x", [GROUPS, TOKENS, WIDE], dtype="float64")
        at = mtf.input("at", [OUTER, GROUPS, INNER], "int32")
        inverse = mtf.input("inverse", [GROUPS, CHOICES, TOKENS], "int32")
        outputs, factors = {}, mtf.input("factors", [OUTER, GROUPS, INNER, WIDE], "float64")
        for name, y in (
            ("inverse", gather_with_inverse(x, at, TOKENS, inverse, PLACES)),
            ("plain", mtf.gather(x, at, TOKENS, out_of_range="zero")),
        ):
            back = gather_places(y, at.shape.dims, inverse, PLACES)
            (dx,) = mtf.gradients([mtf.reduce_sum(y * factors)], [x])
            outputs |= {name: y, f"{name}, back": back, f"{name}, gradient": dx}
        kinds = {op.opdef.name for op in dx.graph.operations}
        session = mtf.Session(outputs)
    assert "scatter_add" in kinds
    feeds = {"at": by_place, "inverse": slot, "factors": rng.normal(size=factors.shape.sizes)}
    state = {"x": rng.normal(size=(GROUPS.size, TOKENS.size, WIDE.size))}
    tried = 0
    while tried < LAYOUTS:
        layout = draw_layout(rng, ("g", "t", "k", "d", "e", "p", "places"))
        if not session.check(layout.mesh_text, layout.rules_text).ok:
            continue
        tried += 1
        (result,) = run(session.lower(layout.mesh_text, layout.rules_text), feeds, "fast", state=state)
        for part in ("", ", back", ", gradient"):
            np.testing.assert_allclose(result[f"inverse{part}"], result[f"plain{part}"], rtol=1e-12, atol=1e-12)
        seated = slot < PLACES.size
        rows = np.where(seated[..., None], state["x"][:, None], 0.0)
        np.testing.assert_allclose(result["inverse, back"], rows, rtol=1e-12)
