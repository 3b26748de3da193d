"""Tensors that the library makes for itself are laid out by what fits; only what users make and see can be at fault."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest

import meshlib as mtf
from layouts import Dimension, Shape
from meshlib.core.graph import Tensor
from meshlib.program.checker import check_program
from tests.effort import draws
from tests.oracle import assert_close, draw_layout, run

A, B, C = "a", "b", "c"
Build = Callable[[Tensor, Tensor], Tensor | list[Tensor]]


def dim(t: Tensor, name: str) -> Dimension:
    return t.shape.dim(name)


def attended(x: Tensor, y: Tensor) -> list[Tensor]:
    keys = mtf.rename_dimension(x, A, "memory")
    return [mtf.layers.dot_product_attention(x, keys, keys, A, "memory", B), keys]


# Each returns all that has dims and is made of x[a, b] and y[b, c] in calls of public functions.
CALLS: dict[str, Build] = {
    "softmax": lambda x, y: mtf.softmax(x, dim(x, A)),
    "log_softmax": lambda x, y: mtf.log_softmax(x, dim(x, B)),
    "reduce_logsumexp": lambda x, y: mtf.reduce_logsumexp(x, dim(x, A)),
    "reduce_mean": lambda x, y: mtf.reduce_mean(x),
    "cumprod": lambda x, y: mtf.cumprod(x, A),
    "cumsum": lambda x, y: mtf.cumsum(x, A),
    "three factors": lambda x, y: mtf.einsum([x, y, y], output_shape=[dim(x, A)]),
    "outer": lambda x, y: mtf.einsum([mtf.reduce_sum(x), x, y], output_shape=[dim(y, C)]),
    "halo": lambda x, y: mtf.halo_exchange(x, dim(x, A), dim(x, B), 1),
    "wide halo": lambda x, y: mtf.left_halo_exchange(x, dim(x, A), dim(x, B), dim(x, B).size + 1, wrap=True),
    "strided": lambda x, y: mtf.strided_slice(x, 0, (dim(x, A).size + 1) // 2, 2, A),
    "sort": lambda x, y: mtf.sort(x, dim(x, A)),
    "top_1": lambda x, y: mtf.top_1(x, dim(x, A))[0],
    "nth": lambda x, y: mtf.nth_smallest_element(x, 0, dim(x, A)),
    "gelu": lambda x, y: mtf.gelu(x),
    "clip": lambda x, y: mtf.clip_by_value(x, -0.5, 0.5),
    "quantized": lambda x, y: mtf.quantized_einsum([x, y], output_shape=[dim(x, A), dim(y, C)]),
    "split": lambda x, y: mtf.split(x, dim(x, A), [1] * dim(x, A).size),
    "stack": lambda x, y: mtf.stack([x, x, x], "c"),
    "unstack": lambda x, y: mtf.unstack(x, dim(x, A)),
    "dropout": lambda x, y: mtf.dropout(x, True, rate=0.5, noise_shape=[dim(x, A)]),
    "shift": lambda x, y: mtf.shift(x, 1, A, wrap=False),
    "dynamic_shift": lambda x, y: mtf.dynamic_shift(x, mtf.cast(mtf.reduce_max(y), "int32"), A, wrap=True),
    "layer_norm": lambda x, y: mtf.layers.layer_norm(x, dim(x, B)),
    "rms_norm": lambda x, y: mtf.layers.rms_norm(x, dim(x, A)),
    "dense": lambda x, y: mtf.layers.dense(x, dim(y, C), reduced_dims=[dim(x, A)]),
    "cross entropy": lambda x, y: mtf.layers.softmax_cross_entropy_with_logits(x, x, dim(x, A), z_loss=0.1),
    "attention": attended,
}


def tensors_of(calls: Build, sizes: tuple[int, int, int]) -> tuple[dict[str, Tensor], list[Shape]]:
    """What to fetch of a program of one call and its gradient, and the shapes that a user sees of it."""
    a, b, c = (Dimension(n, s) for n, s in zip((A, B, C), sizes, strict=True))
    with mtf.Graph() as graph:
        x, y = mtf.input("x", [a, b], "float64"), mtf.input("y", [b, c], "float64")
        made = calls(x, y)
        results = made if isinstance(made, list) else [made]
        wanted = [x, y, *(v.output for v in graph.variables.values())]
        found = mtf.gradients(results, wanted)
    outputs = {f"y{n}": t for n, t in enumerate(results)}
    outputs |= {f"d{n}": t for n, t in enumerate(found) if t is not None}
    return outputs, [t.shape for t in (*wanted, *outputs.values())]


@pytest.mark.parametrize("name", CALLS)
def test_a_layout_that_fits_all_that_users_see_is_lowered(name: str) -> None:
    rng = np.random.default_rng([len(name), *name.encode()])
    tried = 0
    for _ in range(draws(3, 100)):
        sizes = tuple(int(rng.choice((1, 2, 3, 4, 6, 8))) for _ in range(3))
        try:
            outputs, shapes = tensors_of(CALLS[name], sizes)
        except mtf.MeshlibError:  # the call has no such sizes
            continue
        feeds = {"x": rng.uniform(0.5, 1.5, sizes[:2]), "y": rng.uniform(0.5, 1.5, sizes[1:])}
        session = mtf.Session(outputs)
        wanted = run(session.lower(precision="highest"), feeds)[0]
        for _ in range(draws(8, 12)):
            layout = draw_layout(rng, [A, B, C])
            if not layout.rules or not layout.allows(shapes):
                continue
            program = session.lower(layout.mesh_text, layout.rules_text, "highest")
            check_program(program, "the end")
            assert_close(run(program, feeds)[0], wanted, 1e-8, f"{name} {sizes} {layout}", floor=1.0)
            tried += 1
            if tried == draws(4, 1200):
                return
    assert tried


# What the call makes inside: its sizes, a layout that fits x, y and the result but not what lies between, the note.
REFUSED_BEFORE = {
    "softmax": ((4, 3, 1), "p:2", "a:p;b:p?", "dim 'b' does not divide over axis 'p': 3 % 2 = 1"),
    "cumprod": ((3, 4, 1), "p:2", "b:p;a:p?", "dim 'a' does not divide over axis 'p': 3 % 2 = 1"),
    "halo": ((4, 2, 1), "p:2", "b:p", "dim 'b' does not divide over axis 'p': 1 % 2 = 1"),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE)
def test_inner_tensors_fall_back_with_a_note(name: str) -> None:
    sizes, mesh, layout, expected = REFUSED_BEFORE[name]
    outputs, _ = tensors_of(CALLS[name], sizes)
    report = mtf.check(outputs, mesh=mesh, layout=layout)
    assert report.ok
    program = mtf.lower(outputs, mesh=mesh, layout=layout)
    assert program.notes == report.notes
    (note,) = report.notes
    assert note.startswith(f"{expected}. Nobody named this size of these tensors, which are split as far as it fits: ")
    assert re.search(r"test_inner_tensors\.py:\d+\): [a-z0-9]+\[", note)


def test_two_factors_of_three_that_claim_one_axis() -> None:
    a, b = Dimension("a", 4), Dimension("b", 4)
    with mtf.Graph():
        x, y, z = mtf.input("x", [a], "float64"), mtf.input("y", [b], "float64"), mtf.input("z", [b], "float64")
        kept = mtf.einsum([x, y, z], output_shape=[a], name="kept")  # x times y has both
    program = mtf.lower({"y": kept}, mesh="p:2", layout="a:p;b:p", precision="highest")
    (note,) = program.notes
    assert "dims 'a' and 'b' of one tensor are both split over axis 'p'" in note
    feeds = {n: np.random.default_rng(5).uniform(0.5, 1.5, t.shape.sizes) for n, t in (("x", x), ("y", y), ("z", z))}
    wanted = np.einsum("a,b,b->a", *feeds.values())
    assert_close(run(program, feeds)[0], {"y": wanted}, 1e-12, "three factors")


def test_what_users_make_stays_at_fault() -> None:
    a, b = Dimension("a", 4), Dimension("b", 3)
    with mtf.Graph():
        x = mtf.input("x", [a, b])
        largest = mtf.reduce_max(x, reduced_dim=a)
        mean = mtf.reduce_mean(x, output_shape=[b])
        every_other = mtf.strided_slice(x, 0, 1, 2, "a")
        inside = mtf.recompute_grad(lambda v: mtf.reduce_sum(v * 2.0, output_shape=[b]) + 1.0, [x])
    for y, layout in ((largest, "a:p;b:p?"), (mean, "a:p;b:p?"), (every_other, "a:p"), (inside, "a:p;b:p?")):
        (fault,) = mtf.check([mtf.tanh(y)], mesh="p:2", layout=layout).faults
        assert re.search(r"[13] % 2 = 1", fault)
        with pytest.raises(mtf.LayoutError, match=r"[13] % 2 = 1"):
            mtf.lower([mtf.tanh(y)], mesh="p:2", layout=layout)


def test_variables_that_a_layer_makes_stay_at_fault() -> None:
    with mtf.Graph():
        y = mtf.layers.dense(mtf.input("x", [Dimension("a", 4)]), Dimension("new", 3), name="ffn")
    with pytest.raises(mtf.LayoutError, match=r"3 % 2 = 1"):
        mtf.lower([mtf.reduce_sum(y)], mesh="p:2", layout="new:p")


def test_a_rule_that_no_tensor_can_follow_is_a_fault() -> None:
    """Rules may name dims that only inner tensors have; then there is nobody else to follow them."""
    with mtf.Graph():
        y = mtf.strided_slice(mtf.input("x", [Dimension("a", 12)]), 0, 4, 3, "a")
    assert mtf.check([y], mesh="p:3", layout="a_stride:p").notes  # of 3 elements; of the one that is taken later, not
    with pytest.raises(mtf.LayoutError, match=r"(?s)dim 'a_stride'.* 3 % 2 = 1"):
        mtf.lower([y], mesh="p:2", layout="a_stride:p")


def test_public_functions_can_be_pickled() -> None:
    for function in (mtf.softmax, mtf.layers.dense, mtf.einsum, mtf.sub):
        assert pickle.loads(pickle.dumps(function)) is function
    assert mtf.sub is mtf.subtract


def test_a_dim_of_the_users_own_never_refuses_for_the_librarys_tensors() -> None:
    """The product of two of three factors is the only activation with the dim, and 4 does not divide over 3."""
    with mtf.Graph():
        v = mtf.variable("v", [Dimension("a", 4)])
        y = mtf.einsum([v, v, v], output_shape=[])
    program = mtf.lower({"y": y}, mesh="p:3", layout="activations/a:p")
    assert program.sent_bytes == 0
    assert any("4 % 3 = 1" in note and "Nobody named" in note for note in program.notes)
    mtf.verify({"y": y}, layouts=[("p:3", "activations/a:p"), ("p:2", "activations/a:p")]).raise_for_failures()
