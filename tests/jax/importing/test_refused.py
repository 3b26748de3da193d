"""What `from_jax` refuses, each in one line by its name: the rows of the table on the room's page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp, lax = jax.numpy, jax.lax

import meshlib as mtf  # noqa: E402
from meshlib.jax.importing.code import NotImported  # noqa: E402
from tests.paths import ROOT  # noqa: E402

W = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def referred(w: Any) -> Any:
    ref = jax.new_ref(w)
    ref[0, 0] = 1.0
    return ref[...].sum()


def grouped(w: Any) -> Any:
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(
        lambda w: lax.all_gather(w, "a", axis_index_groups=[[0]]),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )(w).sum()


# name on the page -> a function, and what is said of it
ROWS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "svd": (lambda w: jnp.linalg.svd(w, compute_uv=False).sum(), r"svd \(test_refused.py:\d+\): an unknown primitive"),
    "eigh": (lambda w: jnp.linalg.eigh(w)[0].sum(), r"eigh \(.*: an unknown primitive"),
    "qr": (lambda w: jax.scipy.linalg.qr(w, pivoting=True)[1].sum(), r"qr \(.*: an unknown primitive"),
    "complex lu": (lambda w: jnp.linalg.solve(w + 1j, w + 0j).real.sum(), r"complex lu \(.*: an unknown primitive"),
    "igamma": (lambda w: jax.scipy.special.gammainc(w, w).sum(), r"igamma \(.*: an unknown primitive"),
    "bitcast_convert_type": (
        lambda w: lax.bitcast_convert_type(w, "uint8").sum(),
        r"bitcast_convert_type \(.*from float32 to uint8; both must have 8, 16 or 32 bits",
    ),
    "device_put": (lambda w: jax.device_put(w * 2, jax.memory.Space.Host).sum(), r"device_put \(.*to the host's mem"),
    "approx_top_k": (lambda w: lax.approx_max_k(w, 2)[0].sum(), r"approx_top_k \(.*: an unknown primitive"),
    "new_ref": (referred, r"new_ref \(.*: an unknown primitive"),
    "while": (
        lambda w: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2 + 1, w).sum(),
        r"while \(.*: a loop whose number of trips depends on data; give it a bound",
    ),
    "key_data": (
        lambda w: w.sum() + jax.random.key_data(jax.random.key(0)).astype("float32").sum(),
        r"convert_element_type \(.*: it reads the bits of a random key",
    ),
    "axis_index_groups": (grouped, r"shard_map \(.*: a collective in it that JAX cannot map over blocks"),
    "poisson": (lambda w: jax.random.poisson(jax.random.key(0), w * w).sum() * 1.0, r"while \(.*depends on data"),
    "pure_callback": (
        lambda w: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(W.shape, W.dtype), w).sum(),
        r"pure_callback \(.*'sin': say what it computes, as a JAX function: from_jax\(..., kernels=",
    ),
    "float16": (lambda w: w.astype("float16").sum(), r"of dtype float16; use bfloat16 or float32, or from_jax"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_by_name(name: str) -> None:
    function, said = ROWS[name]
    with pytest.raises(NotImported, match=said):
        mtf.from_jax(function, W)


def test_the_page_lists_them() -> None:
    page = (ROOT / "meshlib" / "jax" / "README.md").read_text()
    table = page.partition("| refused by `from_jax` |")[2].partition("\n\n")[0]
    assert not [name for name in ROWS if name not in table]
