"""Grouped experts, whose groups and shards follow from the layout, on random routings under random layouts.

Values and gradients equal `lax.ragged_dot` on tokens sorted in JAX, and the products with masks that have room for all.
By hand, a thousand: `pytest tests/layers/test_grouped_experts.py --hypothesis-profile=deep`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshlib as mtf
from meshlib.layers import Routing, expert_rows
from meshlib.program.instructions import Compute
from meshlib.program.records import walk
from tests.effort import deep, draws
from tests.oracle import Array, assert_close, draw_layout, run

D = mtf.Dimension
BATCH, LENGTH, WIDE, HIDDEN = D("batch", 4), D("length", 8), D("d", 4), D("f", 8)
DIMS = ("batch", "length", "d", "f", "e", "e", "e", "batch", "batch_unsplit", "length_unsplit", "e_unsplit")
LAYOUTS = draws(10, 20)  # of each routing
ON_ALL = ("beside a length that stays split",)


@dataclass(frozen=True)
class Drawn:
    """A routing, how many experts there are, and how uneven their load is."""

    routing: Routing
    experts: int
    skew: float

    @classmethod
    def of(cls, rng: np.random.Generator) -> Drawn:
        experts = int(rng.choice([2, 4, 8]))
        groups = int(rng.choice([1, 2])) if experts == 8 else 1
        routing = Routing(
            top_k=int(rng.integers(1, min(experts // groups, 3) + 1)),
            scores=str(rng.choice(["softmax", "sigmoid"])),
            renormalise=bool(rng.random() < 0.5),
            scale=float(rng.choice([1.0, 2.5])),
            expert_groups=groups,
            group_score="max",
            capacity_factor=None,
        )
        return cls(routing, experts, float(rng.choice([0.1, 1.0, 8.0])))

    def sessions(self, form: str) -> tuple[mtf.Session, mtf.Session]:
        """The layer on variables: its values, and these with all gradients."""
        with mtf.Graph() as graph:
            x = mtf.variable("x", [BATCH, LENGTH, WIDE], dtype="float64")
            y = mtf.layers.moe(
                x, D("e", self.experts), HIDDEN, self.routing, "silu", True, form=form, numerics=mtf.Numerics("float64")
            )
            loss = mtf.reduce_sum(y.values * mtf.input("factors", y.values.shape, "float64"))
            trained = graph.trainable_variables
            gradients = mtf.gradients([loss], trained)
        outputs = {"values": y.values, "load": y.load, "balance": y.balance_loss, "dropped": y.dropped}
        whole = mtf.Session(outputs | {v.name: g for v, g in zip(trained, gradients, strict=True)})
        return mtf.Session({"values": y.values}), whole


def reference(values: dict[str, Array], drawn: Drawn) -> jax.Array:
    """All tokens together, sorted by expert."""
    r = drawn.routing
    x = values["x"].reshape(-1, WIDE.size)
    logits = x @ values["moe/router/kernel"]
    scores = jax.nn.softmax(logits) if r.scores == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores
    if r.expert_groups > 1:
        apart = scores.reshape(len(x), r.expert_groups, -1)
        best = jnp.argmax(apart.max(-1), axis=-1)
        mine = jnp.arange(r.expert_groups) == best[:, None]
        ranked = jnp.where(mine[..., None], apart, -1.0).reshape(scores.shape)
    _, index = lax.top_k(ranked, r.top_k)
    gates = jnp.take_along_axis(scores, index, 1)
    gates = (gates / gates.sum(-1, keepdims=True) if r.renormalise else gates) * r.scale
    order = jnp.argsort(index.reshape(-1), stable=True)
    token = order // r.top_k
    sizes = jnp.bincount(index.reshape(-1), length=drawn.experts)
    wi, gate, wo = (values[f"moe/experts/{name}/kernel"] for name in ("wi", "wi_gate", "wo"))
    h = jax.nn.silu(lax.ragged_dot(x[token], gate, sizes)) * lax.ragged_dot(x[token], wi, sizes)
    rows = lax.ragged_dot(h, wo, sizes) * gates.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[token].add(rows).reshape(values["x"].shape)


@pytest.mark.parametrize("seed", range(draws(2, 50)))
def test_random_routings_under_random_layouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = Drawn.of(rng)
    forward, whole = drawn.sessions("grouped")
    program = whole.lower()
    values = {name: rng.normal(size=v.tensor.shape.sizes) for name, v in program.variables.items()}
    values["moe/router/kernel"] *= drawn.skew
    feeds = {"factors": rng.normal(size=values["x"].shape)}
    (wanted,) = run(drawn.sessions("einsum")[1].lower(), feeds, "fast", state=values)
    if seed == 1 or deep():

        def both(held: dict[str, Any], factors: Any) -> dict[str, Any]:
            made, back = jax.vjp(lambda held: reference(held, drawn), held)
            return {"values": made, **back(factors)[0]}

        with jax.enable_x64(True):
            oracle = jax.jit(both)({n: jnp.asarray(v) for n, v in values.items()}, jnp.asarray(feeds["factors"]))
        for name, value in oracle.items():
            np.testing.assert_allclose(wanted[name], value, rtol=1e-8, atol=1e-9, err_msg=name)
    tried = 0
    while tried < LAYOUTS:
        layout = draw_layout(rng, DIMS)
        session = whole if tried == 0 or deep() else forward
        if not layout.rules or not session.check(layout.mesh_text, layout.rules_text).ok:
            continue
        (found,) = run(session.lower(layout.mesh_text, layout.rules_text), feeds, "fast", state=values)
        assert_close(found, {name: wanted[name] for name in found}, 1e-9, (drawn, str(layout)), floor=1.0)
        tried += 1


# name -> mesh, layout, and the rows that a device sorts again: (groups, blocks of the length, rows)
EXCHANGES = {
    "all of one axis": ("p:4", "batch:p;e:p", (1, 1, 64)),
    "of the batch's inner axis": ("p:2;q:2", "batch:p+q;e:q;batch_unsplit:p", (2, 1, 32)),
    "of blocks of the length": ("p:2;q:2", "batch:p;length:q;e:p+q", (1, 1, 64)),
    "beside a length that stays split": ("p:2;q:2", "length:p+q;e:p;length_unsplit:q", (4, 2, 8)),
}


def test_rows_of_several_senders_are_sorted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients equal those of products with masks, on all executors; most experts have no rows."""
    monkeypatch.setattr(expert_rows, "LEFT_OUT", -1.0)  # whatever few rows gain
    drawn = Drawn(Routing(top_k=2, capacity_factor=None), 8, 1.0)
    whole, masks = (drawn.sessions(form)[1] for form in ("grouped", "einsum"))
    rng = np.random.default_rng(3)
    reference = masks.lower()
    values = {name: rng.normal(size=v.tensor.shape.sizes) for name, v in reference.variables.items()}
    values["x"] += 2.0  # with the same experts in front for most tokens
    feeds = {"factors": rng.normal(size=values["x"].shape)}
    (wanted,) = run(reference, feeds, "fast", state=values)
    assert (wanted["load"].sum(0) == 0).sum() >= 2
    for name, (mesh, layout, blocks) in EXCHANGES.items():
        program = whole.lower(mesh, layout)
        rows = next(i.outputs[0].tensor for i in program.instructions if i.operation.name == "moe/regrouped")
        assert (rows.shape.sizes[1:-1], rows.shape.names[-2]) == (blocks, "expert_capacity"), name
        executors = ("exact", "fast") if name in ON_ALL or deep() else ("fast",)
        results = {e: run(program, feeds, e, state=values)[0] for e in executors}
        if name in ON_ALL or deep():
            with jax.enable_x64(True):
                on_jax = mtf.on_jax(program)
                on_jax.state.update(values)
                results["jax"] = {n: np.asarray(y) for n, y in on_jax.step(feeds).items()}
        for executor, result in results.items():
            assert_close(result, wanted, 1e-9, (name, executor), floor=1.0)


def test_rows_are_sorted_again_where_that_leaves_out_tiles() -> None:
    """Sixteen senders with 4,096 choices each. Of 16 runs for 8 experts each is 8 tiles of 256 rows; together they are
    8 tiles of 512, and 7 for a second expert."""
    for experts, joined, computed in ((16, False, 16 * 256), (128, True, 15 * 512)):
        with mtf.Graph():
            x = mtf.input("x", "batch:16;length:2048;d:8")
            y = mtf.layers.moe(x, D("e", experts), HIDDEN, Routing(top_k=2, capacity_factor=None), form="grouped")
            program = mtf.lower({"y": y.values}, mesh="p:16", layout="batch:p;e:p")
            alone = mtf.lower({"y": y.values}, mesh="p:16", layout="batch:p")
        assert any(i.operation.name == "moe/regrouped" for i in program.instructions) == joined
        kernels = [u.kernel for u in mtf.estimate(program, "v5e-16").plan.units if u.kernel is not None]
        assert computed in {p.batch * p.m for kernel in kernels for p, _ in kernel.matmuls}
        assert not any(i.operation.name in ("moe/regrouped", "moe/by_sender") for i in alone.instructions)


def test_nothing_is_sorted_again_in_a_loop_that_keeps_all_values() -> None:
    config = mtf.models.preset("mixtral-8x7b").reduced()
    with mtf.Graph():
        program = mtf.lower(*mtf.models.train_step(config, batch=2, length=4, remat="none"))
    names = [visit.instruction.operation.name for visit in walk(program) if isinstance(visit.instruction, Compute)]
    assert [name for name in names if "argsort" in name or name.endswith(("regrouped", "by_sender"))] == [
        "layers/scan/moe/argsort"
    ]
    tokens = {name: np.ones(i.tensor.shape.sizes, "int32") for name, i in program.inputs.items()}
    assert np.isfinite(mtf.simulate(program).step(tokens)["loss"])
