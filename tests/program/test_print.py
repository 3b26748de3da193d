"""Print: what comes out on standard output, how often, under every layout and by both executors."""

from __future__ import annotations

import numpy as np
import pytest

import meshlib as mtf
from tests.oracle import run

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 2)

both = pytest.mark.parametrize("executor", ["exact", "fast"])


@both
@pytest.mark.parametrize("layout", ["", "a:p", "b:q;a:p", "a:q+p", "b:p"])
def test_whole_values_are_printed_once_a_step(executor: str, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mtf.Graph():
        x, i = mtf.input("x", [A, B], "bfloat16"), mtf.input("i", [B], "int32")
        total = mtf.reduce_sum(mtf.cast(x, "float32"), reduced_dim=A, name="total")  # pending under a:p
        y = mtf.Print(mtf.reduce_max(x), [total, i, x], "at: ", name="shown")
        unused = mtf.Print(x, [i], "never: ")
        (dx,) = mtf.gradients([y], [x])
    assert (y.name, unused.shape) == ("shown", x.shape)
    program = mtf.lower({"y": y, "dx": dx}, mesh="p:2;q:2", layout=layout)
    sim = mtf.simulate(program, executor=executor)
    for step in range(2):
        fed = np.arange(8.0).reshape(4, 2) + step
        out = sim.step(x=fed, i=[7, 9])
        assert capsys.readouterr().out == (
            f"at: total: f32[b:2] = {fed.astype(np.float32).sum(axis=0)}\n"
            "at: i: i32[b:2] = [7 9]\n"
            f"at: x: bf16[a:4, b:2] = {fed.astype(np.float32)}\n"
        )
        assert float(out["y"]) == 7 + step
        assert np.asarray(out["dx"], float).tolist() == [[0.0, 0.0]] * 3 + [[0.0, 1.0]]


@both
def test_in_a_loop_each_trip_prints(executor: str, capsys: pytest.CaptureFixture[str]) -> None:
    with mtf.Graph():
        x = mtf.input("x", [A])

        def body(carries: tuple[mtf.Tensor, ...], _: object) -> tuple[list[mtf.Tensor], list[mtf.Tensor]]:
            doubled = carries[0] * 2.0
            return [mtf.Print(doubled, [mtf.reduce_sum(doubled, name="sum")], "trip ")], []

        (y,), _ = mtf.scan(body, [x], dim=mtf.Dimension("n", 3))
    (out,) = run(mtf.lower({"y": y}, mesh="p:2", layout="a:p"), {"x": np.ones(4)}, executor)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" = ")[2] for line in lines] == ["8.0", "16.0", "32.0"]
    assert all(line.startswith("trip ") and "sum: f32[] = " in line for line in lines)
    assert out["y"].tolist() == [8.0] * 4


REMAT = ("full", "none", "matmuls")


@both
@pytest.mark.parametrize("remat", REMAT)
@pytest.mark.parametrize("inside", ["scan", "recompute_grad", "custom_gradient"])
def test_what_is_computed_again_is_not_printed_again(
    executor: str, inside: str, remat: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mtf.Graph():
        x = mtf.input("x", [A], "float64")

        def shown(v: mtf.Tensor) -> mtf.Tensor:
            y = mtf.sin(v)
            if inside == "custom_gradient":
                y = mtf.custom_gradient(
                    lambda u: mtf.Print(u, [u], "at: "), lambda inputs, results, dys: [-dys[0]], [y]
                )
            else:
                y = mtf.Print(y, [y], "at: ")
            return y * y * v

        if inside == "recompute_grad":
            y = mtf.recompute_grad(shown, [x], remat)
        else:
            (y,), _ = mtf.scan(lambda c, s: ([shown(c[0])], []), [x], dim=mtf.Dimension("n", 1), remat=remat)
        (dx,) = mtf.gradients([y], [x])
    program = mtf.lower({"y": y, "dx": dx}, mesh="p:2", layout="a:p")
    (out,) = run(program, {"x": [1.0, 2.0, 3.0, 4.0]}, executor)
    assert capsys.readouterr().out.count("at: ") == 1
    v = np.arange(1.0, 5.0)
    sign = -1 if inside == "custom_gradient" else 1
    np.testing.assert_allclose(out["dx"], np.sin(v) ** 2 + sign * v * np.sin(2 * v), rtol=1e-12)


def test_a_constraint_goes_along() -> None:
    with mtf.Graph():
        x = mtf.constrain(mtf.sin(mtf.input("x", [A])), "a:p")
        y = mtf.sin(mtf.reshape(mtf.Print(x, [x]), [mtf.Dimension("n", 4)]))
    program = mtf.lower({"y": y}, mesh="p:2")
    assert str(next(i for i in program.instructions if i.operation is y.operation).inputs[0].sharding) == "[n:4@p]"


def test_print_takes_neither_memory_nor_time() -> None:
    made = []
    for shown in (False, True):
        with mtf.Graph():
            x = mtf.input("x", [mtf.Dimension("n", 4096), mtf.Dimension("m", 1024)])
            y = mtf.sin(x)
            y = mtf.Print(y, [x]) if shown else y
            program = mtf.lower({"y": mtf.cumsum(mtf.sin(y), "n")}, mesh="p:8", layout="m:p")
        made.append((program.memory.peak_bytes, program.work, mtf.estimate(program, "v3-8").step_seconds))
    assert made[0] == made[1]


def test_what_print_moves_is_what_x_lacks() -> None:
    """Data along the dims of x go to the host from where they lie; other dims are made whole first."""
    with mtf.Graph():
        x, like, other = mtf.input("x", [A]), mtf.input("like", [A]), mtf.input("other", [B])
        outputs = [mtf.Print(x, [like]), mtf.Print(x, [other])]
    program = mtf.lower(outputs, mesh="p:2", layout="a:p;b:p")
    assert [(c.kind, c.tensor) for c in program.collectives] == [("all_gather", "other")]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x: mtf.Print(x, x), "data must be a list, got Tensor"),
        (lambda x: mtf.Print(x, [1.0]), "expected a tensor, got float 1.0"),
        (lambda x: mtf.Print(x, [x], 3), "message must be a text, got int 3"),
    ],
)
def test_bad_arguments(build, words: str) -> None:
    with mtf.Graph(), pytest.raises(mtf.MeshlibError, match=rf"Print \(test_print.py:\d+\): .*{words}"):
        build(mtf.input("x", [A]))
