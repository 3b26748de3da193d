"""Gradients of gradients: every differentiable row of `tests/cases.py` at second order, in float64.

With f the row's reference, c a cotangent and v a direction, s(x, c) = <v, d<c, f(x)>/dx> is built by one
`mtf.gradients`; another gives ds/dx, the Hessian of <c, f> times v, and ds/dc, the Jacobian of f times v. Both are
compared with central differences of the reference alone.
"""

from __future__ import annotations

import numpy as np

import meshlib as mtf
from meshlib.core.graph import Tensor
from tests.cases import CASES, Array, Case
from tests.effort import draws, each, some
from tests.oracle import UNSHARDED, assert_close, run

STEP = 1e-4  # its square and the rounding of a double difference, 1e-16 / STEP**2, are both 1e-8

ROWS = [c for c in CASES if c.differentiable and all(c.inputs[n].dtype is None for n in c.differentiable)]


def directions(case: Case, values: dict[str, Array]) -> dict[str, Array]:
    """A direction per differentiable operand, without symmetries."""
    rng = case.rng(5)
    return {
        n: rng.uniform(0.5, 1.5, values[n].shape) * rng.choice([-1, 1], values[n].shape) for n in case.differentiable
    }


def second_order(case: Case, values: dict[str, Array], cotangent: Array, along: dict[str, Array]) -> dict[str, Array]:
    """By the library: the Hessian of <c, f> times the direction, per operand, and the Jacobian times it."""
    with mtf.Graph():
        operands = {n: mtf.input(n, x.shape, x.dtype or "float64") for n, x in case.inputs.items()}
        y = case.build("float64", *operands.values())
        assert isinstance(y, Tensor)
        c = mtf.input("cotangent", y.shape, y.dtype)
        wrt = [operands[n] for n in along]
        first = mtf.gradients([y], wrt, [c])
        feeds = {**values, "cotangent": cotangent}
        terms = []
        for (n, v), dx in zip(along.items(), first, strict=True):
            assert dx is not None
            feeds[n + "_along"] = v
            terms.append(mtf.reduce_sum(dx * mtf.input(n + "_along", dx.shape, dx.dtype)))
        found = mtf.gradients([mtf.add_n(terms)], [*wrt, c])
        outputs = {n: x for n, x in zip([*along, "cotangent"], found, strict=True) if x is not None}
    (out,) = run(mtf.lower(outputs, mesh=UNSHARDED, precision="highest"), feeds, "fast")
    shapes = {**{n: v.shape for n, v in along.items()}, "cotangent": cotangent.shape}
    return {n: np.asarray(out[n], np.float64) if n in out else np.zeros(shape) for n, shape in shapes.items()}


def places(case: Case, size: int) -> Array:
    """Where differences are taken: everywhere, or in a few elements."""
    return np.sort(case.rng(8).permutation(size)[: draws(2, size)])


def differences(case: Case, values: dict[str, Array], cotangent: Array, along: dict[str, Array]) -> dict[str, Array]:
    """The same by central differences of the reference, in some elements of the operands."""

    def f(point: dict[str, Array]) -> Array:
        return np.asarray(case.reference(*point.values()), np.float64)

    def moved(point: dict[str, Array], sign: int) -> dict[str, Array]:
        return {n: x + sign * STEP * along[n] if n in along else x for n, x in point.items()}

    def slope(point: dict[str, Array]) -> Array:
        return (f(moved(point, 1)) - f(moved(point, -1))) / (2 * STEP)

    found = {"cotangent": slope(values)}
    for n in along:
        slopes = []
        for flat in places(case, values[n].size):
            index, sides = np.unravel_index(flat, values[n].shape), []
            for sign in (1, -1):
                point = {m: np.array(x) for m, x in values.items()}
                point[n][index] += sign * STEP
                sides.append(np.sum(cotangent * slope(point)))
            slopes.append((sides[0] - sides[1]) / (2 * STEP))
        found[n] = np.array(slopes)
    return found


@each("case", some(ROWS, ROWS[::2]), parts=8)
def test_second_derivatives(case: Case) -> None:
    values = dict(zip(case.inputs, case.values(), strict=True))
    shape = np.shape(case.reference(*values.values()))
    cotangent = case.rng(6).uniform(0.4, 1.6, shape) * case.rng(7).choice([-1, 1, 1], shape)
    along = directions(case, values)
    wanted = differences(case, values, cotangent, along)
    found = second_order(case, values, cotangent, along)
    scale = max(1.0, *(abs(dx).max(initial=0.0) for dx in found.values()))
    found |= {n: found[n].ravel()[places(case, found[n].size)] for n in along}
    # Where the Hessian is zero, differences leave rounding: 1e-6 of 1 then, or of the largest element.
    assert_close(found, wanted, 1e-6, f"{case} at second order", floor=scale)


def test_the_rows_bend() -> None:
    """The check means something: most rows have a second derivative that is not zero."""
    bent = 0
    for case in ROWS:
        values = dict(zip(case.inputs, case.values(), strict=True))
        along = directions(case, values)
        low, here, high = (
            np.sum(case.reference(*(x + n * STEP * along[m] if m in along else x for m, x in values.items())))
            for n in (-1, 0, 1)
        )
        bent += abs(low - 2 * here + high) / STEP**2 > 1e-3
    assert bent > 50
