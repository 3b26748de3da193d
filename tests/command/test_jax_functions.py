"""`meshlib` on a JAX function: its arguments from the file or the command line, the names of axes, its dims."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command.test_command import run

pytest.importorskip("jax")

FILE = """
import jax, jax.numpy as jnp

def loss(params, x, *, scale=1.0):
    def layer(h, p):
        return h + jnp.tanh(h @ p["w"]) @ p["v"] * scale, None
    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()

def loss_arguments():
    shape = jax.ShapeDtypeStruct
    return {"w": shape((4, 16, 32), "float32"), "v": shape((4, 32, 16), "float32")}, shape((8, 16), "float32")

def plain(x, w):
    return jnp.tanh(x @ w)
"""
NAMES = ["--names", "x=batch d_model", "--names", "*.w=layers _ d_ff"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(FILE)
    return str(path)


def test_dims_say_where_they_come_from(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run("dims", f"{file}:loss", *NAMES, capsys=capsys)
    assert (status, err) == (0, "")
    assert [line.split(maxsplit=2) for line in out.splitlines()] == [
        ["dim", "size", "where from"],
        ["layers", "4", "named by you: params/v axis 0, params/w axis 0"],
        ["d_ff", "32", "named by you: params/v axis 1, params/w axis 2"],
        ["d_model", "16", "named by you: params/v axis 2, params/w axis 1, x axis 1"],
        ["batch", "8", "named by you: x axis 0"],
    ]
    status, out, _ = run("dims", f"{file}:plain", "--arg", "x=f32[6,4]", "--arg", "w=bf16[4,2]", capsys=capsys)
    assert status == 0
    assert "w_1     2  w axis 1" in out


def test_a_loss_is_planned_as_a_step_of_its_training(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--layout", "batch:data;d_ff:model@data:2;model:4", "--slice", "v5e-8"]
    status, out, err = run("plan", f"{file}:loss", *NAMES, "--set", "scale=0.5", *layout, capsys=capsys)
    assert (status, err) == (0, "")
    assert out.startswith("model.py:loss, adam on v5e-8: fits")
    assert "slots" in out
    assert "all_reduce over data" in out
    status, out, _ = run("plan", f"{file}:loss", *NAMES, "--optimizer", "none", *layout, capsys=capsys)
    assert out.startswith("model.py:loss on v5e-8: fits")
    assert "slots" not in out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["plain", "--arg", "x=f32"], "--arg must be NAME=DTYPE[SIZES], such as"),
        (["plain", "--arg", "x=f33[2]"], "no dtype 'f33'; did you mean 'f32'?"),
        (["plain", "--arg", "x=f32[0]"], "sizes are 1 or more"),
        (["plain", "--arg", "x=f32[2]", "--arg", "x=f32[2]"], "x is given twice"),
        (["plain", "--arg", "x.a=f32[2]", "--arg", "x.a.b=f32[2]"], "a is an array already"),
        (["plain", "--arg", "y=f32[2]"], "the function takes no 'y'; it takes x, w"),
        (["plain", "--arg", "x=f32[2,4]"], "say what w is: --arg w=f32[256,512]"),
        (["plain"], "plain() missing 2 required positional arguments"),
        (["plain", "--names", "x=b"], "--names is for JAX functions whose arguments are given"),
        (["loss", "--names", "x"], "--names must be PATH=NAMES, such as"),
        (["loss", "--names", "x=a"], "'x' has 1 name, 'a', but x has 2 axes, [8, 16]"),
        (
            ["plain", "--arg", "x=f32[2,4]", "--arg", "w=f32[5,4]"],
            "failed at model.py:14: TypeError: dot_general requires",
        ),
    ],
)
def test_mistakes(given: list[str], said: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = given
    status, out, err = run("dims", f"{file}:{name}", *rest, capsys=capsys)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
