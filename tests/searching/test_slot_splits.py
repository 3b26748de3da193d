"""Factors that rules for slots may split, against those that a lowering lets an axis with such rules alone split."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

import meshlib as mtf
from meshlib.core.graph import FORWARD, Operation, Tensor
from meshlib.core.opdef import Kind
from meshlib.lowering.strategies import Space
from meshlib.searching.bounds.slot_splits import SlotSplits
from tests.effort import draws
from tests.searching.test_bounds import Build, attending, network


def model(remat: str, name: str = "llama3.1-8b") -> Build:
    """A step of a small model, as a search builds it."""
    sizes = {"layers": 2, "vocab": 256, "d_model": 64, "d_ff": 128, "heads": 4, "kv_heads": 2, "head_dim": 16}

    def build() -> tuple[Mapping[str, Tensor], Sequence[Operation]]:
        return mtf.models.train_step(mtf.models.preset(name).replace(**sizes), 8, 64, remat=remat)

    return build


MODELS = {
    **{remat: model(remat) for remat in ("none", "matmuls", "full")},
    "experts": model("none", "mixtral-8x7b"),
    **{f"network {seed}": network(seed) for seed in range(draws(8, 100))},
    **{f"attention {seed}": attending(seed) for seed in range(draws(2, 20))},
}


@contextmanager
def spaces() -> Iterator[list[Space]]:
    """Collects the spaces of all graphs that are lowered."""
    met: list[Space] = []
    init = Space.__post_init__

    def kept(space: Space) -> None:
        init(space)
        met.append(space)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Space, "__post_init__", kept)
        yield met


@pytest.mark.parametrize("name", MODELS)
def test_a_lowering_splits_no_further_factors(name: str) -> None:
    with mtf.Graph():
        outputs, updates = MODELS[name]()
        splits = SlotSplits(outputs.values(), updates)
        operations = [op for t in outputs.values() for op in t.graph.operations]
    loops = {op.loop.dim.name for op in operations if op.loop is not None}
    dims = dict.fromkeys(d for op in operations for y in op.outputs for d in y.shape.names if d not in loops)
    with spaces() as met:
        mtf.lower(outputs, updates, "z:2", ";".join(f"slots/{d}:z?" for d in dims))
    for space in met:
        for op, factors in space._factors.items():
            for n, axes in enumerate(factors):
                assert not axes or splits.may_split(op, n), (op.name, op.opdef.roles(op)[n])


def test_no_product_of_a_forward_pass_is_split() -> None:
    with mtf.Graph():
        outputs, updates = MODELS["full"]()
        splits = SlotSplits(outputs.values(), updates)
        bodies = {id(op.graph): op.graph for op in splits._factors}
    products = [op for g in bodies.values() for op in g.operations if op.opdef.kind is Kind.CONTRACTION]
    split = {op: any(splits.may_split(op, n) for n, _ in enumerate(op.opdef.roles(op))) for op in products}
    assert not any(split[op] for op in products if op.region == FORWARD)
    assert any(split.values())
