"""Chains of elementwise operations, computed part by part: the same bits as whole arrays, in less memory.

Random programs are computed by part in `test_state.py` and `test_property_programs.py` too.
"""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core.opdef import OPERATIONS, Kind
from meshlib.simulation.chains import Chain
from meshlib.simulation.fast import FastExecutor
from tests.cases import CASES, Case
from tests.effort import draws, each
from tests.oracle import assert_close, computed_by_part, run

A, B, C = mtf.Dimension("a", 5), mtf.Dimension("b", 7), mtf.Dimension("c", 6)
ELEMENTWISE = [case for case in CASES if OPERATIONS[case.op].kind is Kind.ELEMENTWISE]


def both(outputs: dict[str, mtf.Tensor], feeds: dict[str, np.ndarray], updates=(), elements: int = 3, steps: int = 1):
    """Results of whole arrays and of parts, which must have the same bits; returns the executor that uses parts."""
    program = mtf.lower(outputs, updates)
    whole = run(program, feeds, "fast", steps)
    with computed_by_part(elements):
        parts = run(program, feeds, "fast", steps)
        executor = FastExecutor(program)
    for a, b in zip(whole, parts, strict=True):
        assert_close(b, a, 0, "parts against whole arrays")
    return executor


def chains(executor: FastExecutor) -> list[Chain]:
    return [i for i in executor.ready.instructions if isinstance(i, Chain)]


@each("case", ELEMENTWISE, parts=2)
def test_parts_of_every_operation_have_the_bits_of_the_whole(case: Case) -> None:
    values = dict(zip(case.inputs, case.values(), strict=True))
    with mtf.Graph():
        y = case.build("float32", *(mtf.input(n, x.shape, x.dtype or "float32") for n, x in case.inputs.items()))
        both({"y": mtf.identity(y)}, values)


def odd(*dims: mtf.Dimension) -> np.ndarray:
    return np.random.default_rng(len(dims)).normal(size=[d.size for d in dims]).astype(np.float32)


@pytest.mark.parametrize("elements", [1, 4, 7, 100])
def test_operands_may_lack_dims_or_have_them_in_another_order(elements: int) -> None:
    with mtf.Graph():
        x, y = mtf.input("x", [A, B, C]), mtf.input("y", [C, A])
        z, s = mtf.input("z", [B]), mtf.input("s", [])
        wide = mtf.where(mtf.greater(mtf.tanh(x * z) + y, s), mtf.exp(x) - y, z * 2.0)
        total = mtf.add_n([wide, mtf.transpose(wide * s, [A, B, C]), x, mtf.square(wide)])
        feeds = {"x": odd(A, B, C), "y": odd(C, A), "z": odd(B), "s": odd()}
        *_, chain = chains(both({"y": total}, feeds, elements=elements))
    assert len(chain.outputs) == 1
    assert chain.steps[-1].opcode == "add_n"


@pytest.mark.parametrize("seed", range(draws(12, 200)))
def test_values_of_random_chains_live_until_their_last_use(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with mtf.Graph():
        values = [mtf.input("x", [A, B]), mtf.input("y", [A, B])]
        feeds = {"x": odd(A, B), "y": odd(A, B)[::-1]}
        for _ in range(int(rng.integers(3, 16))):
            x, y, z = (values[int(n)] for n in rng.integers(0, len(values), 3))
            choices = [
                lambda x=x: mtf.tanh(x),
                lambda x=x, y=y: mtf.sin(x * y),
                lambda x=x, y=y, z=z: mtf.where(mtf.greater(x, y), z, x),
                lambda x=x, y=y, z=z: mtf.sigmoid(mtf.add_n([x, y, z, y])),
                lambda x=x: mtf.cast(mtf.cast(x * 8.0, "int32"), "float32"),
                lambda x=x, y=y: mtf.maximum(mtf.reduce_max(x, reduced_dim=A), y),
            ]
            values.append(choices[int(rng.integers(len(choices)))]())
        both({"all": mtf.add_n(values), "last": values[-1], "some": values[len(values) // 2]}, feeds)


def test_chains_wait_for_the_instruction_that_reads_them() -> None:
    """Operations on both sides of a product join; those that the product needs come before it."""
    with mtf.Graph():
        x, w = mtf.input("x", [A, B]), mtf.input("w", [B, C])
        before = mtf.tanh(x) * x
        product = mtf.einsum([mtf.sigmoid(x + 1.0), w], [A, C])
        after = before * before + mtf.reduce_sum(product)
        executor = both({"y": after}, {"x": odd(A, B), "w": odd(B, C)})
    assert [[i.opcode for i in c.steps] for c in chains(executor)] == [
        ["add", "sigmoid"],
        ["tanh", "multiply", "multiply", "add"],
    ]


def test_values_inside_a_chain_are_not_stored() -> None:
    with mtf.Graph():
        x = y = mtf.input("x", [A, B, C])
        for _ in range(6):
            y = mtf.tanh(y + x)
        program = mtf.lower({"y": y})
    with computed_by_part():
        executor = FastExecutor(program)
    assert executor.buffers.bytes == 4 * 5 * 7 * 6
    (chain,) = chains(executor)
    assert chain.inputs == (program.inputs["x"],)
    assert not chain.scratch_numbers  # every value overwrites the one before it, in the output's array


@pytest.mark.parametrize("trips", [1, 4])
def test_carries_and_variables_are_updated_by_part(trips: int) -> None:
    def body(carries: list[mtf.Tensor], slices: list[mtf.Tensor]) -> tuple[list[mtf.Tensor], list[mtf.Tensor]]:
        y = mtf.tanh(carries[0] * 0.5 + slices[0])
        return [y, carries[1] + y * carries[0]], [y - carries[1]]

    steps = mtf.Dimension("steps", trips)
    with mtf.Graph():
        x, w = mtf.input("x", [steps, A, B]), mtf.variable("w", [A, B], 0.25)
        (last, total), (stack,) = mtf.scan(body, [w, w * 2.0], [x], steps)
        updates = [mtf.assign(w, last * 0.5 + total)]
        executor = both({"stack": stack, "w": w}, {"x": odd(steps, A, B)}, updates, steps=3)
    (inside,) = executor.bodies.values()
    assert chains(inside)


def test_the_body_of_a_pipeline_that_fills_and_drains_has_no_chains() -> None:
    """Its operations run on the ranges of active stages."""
    with mtf.Graph():
        x = mtf.input("x", [mtf.Dimension("batch", 4), C])
        y = mtf.layers.pipeline(lambda h: mtf.tanh(h + 1.0) * h, x, stages=2, microbatches=4)
        executor = both({"y": y}, {"x": odd(mtf.Dimension("batch", 4), C)})
    (ranged,) = (body for i, body in executor.bodies.items() if i.record.active is not None)
    assert not chains(ranged)
