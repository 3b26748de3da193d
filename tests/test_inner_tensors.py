"""Tensors that the library makes for itself are laid out by what fits; only what users make and see can be at fault."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from math import prod

import numpy as np
import pytest
from hypothesis import settings

import meshlib as mtf
from layouts import Dimension, Shape
from meshlib.errors import LayoutError
from meshlib.graph import Tensor
from meshlib.program.checker import check_program
from tests.oracle import Array, assert_close, draw_layout, run

A, B, C = "a", "b", "c"
Build = Callable[[Tensor, Tensor], Tensor | list[Tensor]]


def dim(t: Tensor, name: str) -> Dimension:
    return t.shape.dim(name)


def attended(x: Tensor, y: Tensor) -> Tensor:
    keys = mtf.rename_dimension(x, A, "memory")
    return mtf.layers.dot_product_attention(x, keys, keys, dim(keys, "memory"), dim(x, B), dim(x, B))


# Each makes one or more tensors of x[a, b] and y[b, c] in one call of a public function.
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
    "dropout": lambda x, y: mtf.dropout(x, 0.5, noise_shape=[dim(x, A)]),
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
        before = len(graph.operations)
        made = calls(x, y)
        results = made if isinstance(made, list) else [made]
        seen = [x, y, *results, *(v.output for v in graph.variables.values())]
        # Operations that the call itself writes on the way with other public functions.
        seen += [t for op in graph.operations[before:] if op not in graph.inner for t in op.outputs]
        wanted = [x, y, *(v.output for v in graph.variables.values())]
        found = mtf.gradients(results, wanted)
    outputs = {f"y{n}": t for n, t in enumerate(results)}
    outputs |= {f"d{n}": t for n, t in enumerate(found) if t is not None}
    return outputs, [t.shape for t in (*seen, *outputs.values())]


@pytest.mark.parametrize("name", CALLS)
def test_a_layout_that_fits_all_that_users_see_is_lowered(name: str) -> None:
    rng = np.random.default_rng([len(name), *name.encode()])
    tried, noted = 0, 0
    for _ in range(max(6, settings.default.max_examples // 100)):
        sizes = tuple(int(rng.choice((1, 2, 3, 4, 6, 8))) for _ in range(3))
        try:
            outputs, seen = tensors_of(CALLS[name], sizes)
        except mtf.MeshlibError:  # the call has no such sizes
            continue
        feeds = {"x": rng.uniform(0.5, 1.5, sizes[:2]), "y": rng.uniform(0.5, 1.5, sizes[1:])}
        wanted = run(mtf.lower(outputs, precision="highest"), feeds)[0]
        for _ in range(12):
            layout = draw_layout(rng, [A, B, C])
            if not layout.rules or not layout.allows(seen):
                continue
            program = mtf.lower(outputs, mesh=layout.mesh_text, layout=layout.rules_text, precision="highest")
            check_program(program, "the end")
            assert_close(run(program, feeds)[0], wanted, 1e-8, f"{name} {sizes} {layout}")
            tried += 1
            noted += any("made these tensors itself" in note for note in program.notes)
    assert tried
