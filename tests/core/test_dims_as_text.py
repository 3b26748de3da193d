"""Dims and activations as text: names of dims that an operand has, "name:size" for new ones, in every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import meshlib as mtf

B, D, N = mtf.Dimension("b", 8), mtf.Dimension("d", 4), mtf.Dimension("n", 3)

# What is written with text, and the same with dims.
PAIRS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda x: mtf.reduce_sum(x, reduced_dim="b"), lambda x: mtf.reduce_sum(x, reduced_dim=B)),
    (lambda x: mtf.reduce_max(x, output_shape="d"), lambda x: mtf.reduce_max(x, output_shape=[D])),
    (lambda x: mtf.softmax(x, "d"), lambda x: mtf.softmax(x, D)),
    (lambda x: mtf.log_softmax(x, "d"), lambda x: mtf.log_softmax(x, D)),
    (lambda x: mtf.einsum([x, x], reduced_dims=["b"]), lambda x: mtf.einsum([x, x], reduced_dims=[B])),
    (lambda x: mtf.einsum([x, x], output_shape="d;b"), lambda x: mtf.einsum([x, x], output_shape=[D, B])),
    (lambda x: mtf.transpose(x, ["d", "b"]), lambda x: mtf.transpose(x, [D, B])),
    (lambda x: mtf.reshape(x, "r:32"), lambda x: mtf.reshape(x, [mtf.Dimension("r", 32)])),
    (lambda x: mtf.broadcast(x, "n:3;b;d"), lambda x: mtf.broadcast(x, [N, B, D])),
    (lambda x: x * mtf.cast(mtf.range("d:4"), "float32"), lambda x: x * mtf.cast(mtf.range(D), "float32")),
    (lambda x: mtf.one_hot(mtf.argmax(x, "d"), "n:3"), lambda x: mtf.one_hot(mtf.argmax(x, D), N)),
    (lambda x: mtf.cumsum(x, "b"), lambda x: mtf.cumsum(x, B)),
    (lambda x: x + mtf.constant(2.0, "d:4"), lambda x: x + mtf.constant(2.0, [D])),
    (
        lambda x: mtf.layers.dense(x, "n:3", "d", activation="relu"),
        lambda x: mtf.layers.dense(x, [N], [D], activation=mtf.relu),
    ),
]


def test_text_means_the_same_as_dims() -> None:
    for by_text, by_dims in PAIRS:
        made = []
        for write, shape in ((by_text, "b:8;d:4"), (by_dims, [B, D])):
            with mtf.Graph() as graph:
                y = write(mtf.input("x", shape))
            made.append((y.type, [(op.opdef.name, op.attrs.keys(), op.output.type) for op in graph.operations]))
        assert made[0] == made[1]


BAD: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: mtf.reduce_sum(x, reduced_dim="batch"), "no dim 'batch'"),
    (lambda x: mtf.softmax(x, "dd"), "did you mean 'd'"),
    (lambda x: mtf.reduce_sum(x, reduced_dim="b:9"), "has size 8"),
    (lambda x: mtf.input("y", "b"), "give its size too, such as 'b:8'"),
    (lambda x: mtf.input("y", ["b:0"]), "b:0"),
    (lambda x: mtf.input("y", "b:8;b:8"), "twice"),
    (lambda x: mtf.range("c"), "give its size too"),
    (lambda x: mtf.einsum([x, x], output_shape="b;e"), "no dim 'e'"),
    (lambda x: mtf.layers.dense(x, [N], activation="rel"), "did you mean 'relu'"),
    (lambda x: mtf.dropout(x, 1.5), r"is_training must be True or False, got 1.5; write dropout\(x, True, rate="),
    (lambda x: mtf.dropout(x, True, rate=1.5), "rate must be in"),
    (lambda x: mtf.models.UNetConfig(level=4), "UNetConfig .*no field 'level'; did you mean 'levels'"),
    (lambda x: mtf.models.TransformerConfig(dff=4), "no field 'dff'; did you mean 'd_ff'"),
    (lambda x: mtf.models.preset("gpt2").replace(dff=4), "no field 'dff'; did you mean 'd_ff'"),
]


@pytest.mark.parametrize(("write", "text"), BAD)
def test_wrong_text_is_said(write: Callable[[Any], Any], text: str) -> None:
    with mtf.Graph():
        x = mtf.input("x", [B, D])
        with pytest.raises(mtf.MeshlibError, match=text):
            write(x)
