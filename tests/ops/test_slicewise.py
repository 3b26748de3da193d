"""slicewise: what functions see, what moves, what it counts, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from tests.oracle import run

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 6), mtf.Dimension("c", 2)


def test_each_device_calls_it_on_its_own_blocks() -> None:
    seen = []

    def centre(x: np.ndarray, shift: np.ndarray) -> np.ndarray:
        seen.append((x.shape, shift.shape))
        return x - np.median(x, axis=0) + shift[0]

    with mtf.Graph():
        x, shift = mtf.input("x", [B, A]), mtf.input("shift", [C])
        y = mtf.slicewise(centre, [x, shift], splittable_dims=[A])
        program = mtf.lower({"y": y}, mesh="p:2;q:2", layout="a:p;b:q;c:q")
    feeds = {"x": np.random.default_rng(0).normal(size=(6, 4)), "shift": [2.0, 3.0]}
    wanted = feeds["x"] - np.median(feeds["x"], axis=0) + 2
    (exact,) = run(program, feeds)
    assert seen == [((6, 2), (2,))] * 4  # b and c whole, a split
    assert sorted((c.kind, c.tensor) for c in program.collectives) == [("all_gather", "shift"), ("all_gather", "x")]
    (fast,) = run(program, feeds, "fast")
    assert seen[4:] == [((6, 4), (2,))]  # once for all blocks
    np.testing.assert_allclose(exact["y"], wanted, rtol=1e-6)
    np.testing.assert_allclose(fast["y"], wanted, rtol=1e-6)


def test_bfloat16_comes_as_float32_and_goes_back_rounded() -> None:
    with mtf.Graph():
        x = mtf.input("x", [A], "bfloat16")
        y = mtf.slicewise(lambda x: x / np.float32(3), [x], splittable_dims=[A])
    (out,) = run(mtf.lower({"y": y}, mesh="p:2", layout="a:p"), {"x": [1.0, 2.0, 5.0, 0.0]})
    assert out["y"].dtype.name == "bfloat16"
    assert out["y"].tolist() == [0.333984375, 0.66796875, 1.6640625, 0.0]


@pytest.mark.parametrize(
    ("count", "wanted"), [(None, 12 + 1 + 12), (lambda ins, out: 5 * ins[0].size * out.dim("b").size, 5 * 12 * 6)]
)
def test_its_work_is_what_it_says_or_one_operation_per_element(count: object, wanted: int) -> None:
    with mtf.Graph():
        x, s = mtf.input("x", [A, B]), mtf.input("s", [])
        y = mtf.slicewise(lambda x, s: x + s, [x, s], splittable_dims=[A], vpu_ops=count)  # type: ignore[arg-type]
    program = mtf.lower({"y": y}, mesh="p:2", layout="a:p")
    assert program.work.vpu_ops == wanted


def test_a_gradient_needs_a_rule_that_fits() -> None:
    with mtf.Graph():
        x = mtf.input("x", [A])
        plain = mtf.slicewise(np.sin, [x], name="own")
        with pytest.raises(
            mtf.GraphError, match=r"slicewise 'own' \(test_slicewise.py:\d+\) has no gradient.*grad_fun"
        ):
            mtf.gradients([plain], [x])
        short = mtf.slicewise(np.sin, [x], grad_function=lambda op, dys: [])
        with pytest.raises(mtf.GraphError, match="returned 0 cotangents for 1 operands"):
            mtf.gradients([short], [x])
        other = mtf.slicewise(np.sin, [x], grad_function=lambda op, dys: [mtf.reduce_sum(dys[0])])
        with pytest.raises(mtf.GraphError, match=r"cotangent slicewise.*: f32\[\] for the operand x: f32\[a:4\]"):
            mtf.gradients([other], [x])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: mtf.slicewise(3, [x]), "fn must be a function, got 3"),
        (lambda x: mtf.slicewise(np.sin, []), "xs must be a non-empty list of tensors"),
        (lambda x: mtf.slicewise(np.sin, x), "xs must be a list, got Tensor"),
        (lambda x: mtf.slicewise(np.sin, [x], vpu_ops=7), "vpu_ops must be a function, got 7"),
        (lambda x: mtf.slicewise(np.sin, [x], [A], splittable_dims=[B]), r"splittable dim b:6 must be in the result"),
        (
            lambda x: mtf.slicewise(np.sin, [x], [C, mtf.Dimension("a", 2)], splittable_dims=[A]),
            r"slicewise \(test_slicewise.py:\d+\): splittable dim a:4 must be in the result \[c:2, a:2\](.|\n)*x: f32",
        ),
    ],
)  # fmt: skip
def test_bad_arguments(build, words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=words):
        build(mtf.input("x", [A, B]))


@pytest.mark.parametrize("executor", ["exact", "fast"])
@pytest.mark.parametrize(
    ("fn", "dtype", "words"),
    [
        (lambda x: x[:, :2], None, r"made float32\[\d, 2\] of float32\[\d, 6\], but the block of its result own: f32"),
        (lambda x: x + 0.5, "int32", r"made float32\[\d, 6\].* is int32\[\d, 6\]"),
        (lambda x: [[1.0], [2.0, 3.0]], None, r"made object\[2\] of float32"),
        (lambda x: np.ma.masked_less(x, 9), None, "slicewise 'own'.*: the function returned a masked array"),
    ],
)  # fmt: skip
def test_a_result_of_another_type_is_named(fn, dtype, words: str, executor: str) -> None:
    with mtf.Graph():
        y = mtf.slicewise(fn, [mtf.input("x", [A, B])], None, dtype, [A], name="own")
    with pytest.raises(mtf.ProgramError, match=words):
        run(mtf.lower({"y": y}, mesh="p:2", layout="a:p"), {"x": np.ones((4, 6))}, executor)


def test_a_function_can_not_change_its_operands() -> None:
    def spoil(x: np.ndarray) -> np.ndarray:
        x += 1
        return x

    with mtf.Graph():
        y = mtf.slicewise(spoil, [mtf.input("x", [A])])
    with pytest.raises(ValueError, match="read-only"):
        run(mtf.lower({"y": y}), {"x": np.ones(4)})


def test_a_fault_of_the_function_names_the_operation() -> None:
    with mtf.Graph():
        y = mtf.slicewise(lambda x: x.reshape(3), [mtf.input("x", [A])], name="own")
    with pytest.raises(ValueError, match="reshape") as caught:
        run(mtf.lower({"y": y}), {"x": np.ones(4)})
    assert caught.value.__notes__[0].startswith("in the function of slicewise 'own' (test_slicewise.py:")


@pytest.mark.parametrize(("count", "words"), [(-1, "not be negative, got -1"), ("many", "be a finite number, got str")])
def test_work_that_can_not_be_is_refused(count: object, words: str) -> None:
    with mtf.Graph():
        y = mtf.slicewise(np.sin, [mtf.input("x", [A])], vpu_ops=lambda ins, out: count)  # type: ignore[arg-type, return-value]
    with pytest.raises(mtf.GraphError, match=f"what vpu_ops returns must {words}"):
        _ = mtf.lower({"y": y}).work
