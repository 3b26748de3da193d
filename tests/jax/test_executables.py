"""Files of compiled steps: for which program they are, and what becomes of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from tests.effort import each

pytest.importorskip("jax")

from meshlib.jax.executables import MAGIC, fingerprint, jax_versions, read_executable, write_executable


def program(
    power: int = 3,
    values: tuple[float, ...] = (1, 2, 3, 4),
    epsilon: float = 1e-6,
    slope: float = 0.5,
    rolled: int = 1,
    trips: int = 3,
    inside: float = 0.1,
    initial: float = 1.0,
    precision: str = "default",
    unused: bool = False,
) -> mtf.Program:
    with mtf.Graph():
        d = mtf.Dimension("d", 4)
        x, w = mtf.input("x", [d]), mtf.variable("w", [d], initial)
        y = mtf.pow(x * w * mtf.constant(np.array(values, np.float32), [d]), power)
        y = mtf.shift(mtf.leaky_relu(y, slope), rolled, d, wrap=True)
        (y,), _ = mtf.scan(lambda c, _: ([mtf.tanh(c[0]) * inside], []), [y], dim=mtf.Dimension("trips", trips))
        y = mtf.layers.rms_norm(y, d, epsilon=epsilon, name="norm")
        if unused:
            mtf.exp(y)
        return mtf.lower({"y": mtf.reduce_sum(y)}, [mtf.assign(w, w * 0.5)], precision=precision)


CHANGES: dict[str, dict[str, Any]] = {
    "an exponent": {"power": 2},
    "an element of a constant": {"values": (1, 2, 3, 5)},
    "an epsilon": {"epsilon": 1e-3},
    "a slope": {"slope": 0.25},
    "an offset": {"rolled": 2},
    "trips of a loop": {"trips": 4},
    "a factor in a loop": {"inside": 0.2},
    "the precision": {"precision": "highest"},
}


@each("change", list(CHANGES))
def test_a_step_of_another_program_is_told(change: str) -> None:
    assert fingerprint(program(**CHANGES[change])) != fingerprint(program())


def test_what_no_step_depends_on_is_no_part_of_it() -> None:
    """Initial values come with the state; operations that nothing fetches are not compiled."""
    assert fingerprint(program()) == fingerprint(program(initial=2.0)) == fingerprint(program(unused=True))


def compiled() -> Any:
    return SimpleNamespace(
        program=program(), slice=SimpleNamespace(name="v5e-1"), device_kind="TPU", versions=jax_versions(),
        executable=bytes(range(256)) * 4,
    )  # fmt: skip


def edited(**changed: Any) -> Any:
    def edit(raw: bytes) -> bytes:
        head, _, body = raw[len(MAGIC) :].partition(b"\n")
        return MAGIC + json.dumps({**json.loads(head), **changed}).encode() + b"\n" + body

    return edit


DAMAGE: dict[str, tuple[Any, str]] = {
    "cut": (lambda raw: raw[:-9], "1,015 bytes have the SHA-256"),
    "one bit": (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "1,024 bytes have the SHA-256"),
    "another kind of file": (lambda raw: b"GIF89a" + raw, "does not begin with 'meshlib compiled step 2'"),
    "a head without an end": (lambda raw: MAGIC + b"[" * 2**20, "nested deeper"),
    "a head that is a list": (lambda raw: MAGIC + b"[]\n", "holds list"),
    "no versions": (edited(versions=None), "'versions' must be an object"),
    "a number for a text": (edited(mesh=3), "'mesh' must be text"),
    "versions of others": (edited(versions={"jax": [3]}), r"compiled by jax \[3\], but this is"),
    "another device": (edited(device_kind="CPU"), "compiled for CPU devices, but these are TPU"),
}


@each("damage", list(DAMAGE))
def test_damaged_files_are_refused(damage: str, tmp_path: Path) -> None:
    edit, message = DAMAGE[damage]
    path = tmp_path / "step"
    write_executable(path, compiled())
    assert read_executable(path, program(), "TPU", jax_versions()) == compiled().executable
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(mtf.ProgramError, match=message) as caught:
        read_executable(path, program(), "TPU", jax_versions())
    assert "\n" not in str(caught.value)
