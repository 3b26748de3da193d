"""PartitionSpecs out of a program: they are JAX's own, and what XLA sends by them."""

# ruff: noqa: E402 (whatever needs JAX comes after a look whether it is there)

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")

from jax.sharding import NamedSharding, PartitionSpec

import meshlib as mtf
from tests.jax.models import mlp


def test_specs_lay_arrays_as_the_program_does() -> None:
    program = mlp("a:2;b:2;c:2", "batch:c+a;hidden:b;pixels:b?")
    specs = mtf.partition_specs(program)
    mesh = specs.mesh()
    named = {**program.variables, **program.inputs}
    for name, spec in {**specs.variables, **specs.inputs}.items():
        v = named[name]
        places = NamedSharding(mesh, spec).devices_indices_map(v.tensor.shape.sizes)
        for device, coordinate in zip(mesh.devices.flat, program.mesh.coordinates(), strict=True):
            wanted = v.sharding.slices(coordinate)
            found = tuple(slice(*s.indices(n)[:2]) for s, n in zip(places[device], v.tensor.shape.sizes, strict=True))
            assert found == wanted, name
    assert specs.inputs["x"] == PartitionSpec(("c", "a"), "b")


def test_xla_sends_what_data_parallelism_takes() -> None:
    program = mlp("data:8", "batch:data")
    specs = mtf.partition_specs(program)
    assert specs.xla_sent_bytes() == pytest.approx(program.sent_bytes, rel=0.01)
    assert "1.00 times" in specs.note()


def test_values_can_be_constrained() -> None:
    specs = mtf.partition_specs(mlp("rows:2;cols:4", "batch:rows;hidden:cols"))
    name = next(n for n, s in specs.values.items() if s == PartitionSpec("rows", "cols"))
    with jax.set_mesh(specs.mesh()):
        y = jax.jit(lambda x: specs.constrain(name, x))(np.zeros((16, 32), np.float32))
    assert y.sharding.spec == PartitionSpec("rows", "cols")
    with pytest.raises(mtf.GraphError, match="computes no 'nothing'"):
        specs.constrain("nothing", 0)
