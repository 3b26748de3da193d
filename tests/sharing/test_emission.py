"""Plans for other libraries: read back by these libraries, or run, they give the shardings of the program."""

from __future__ import annotations

from typing import Any

import pytest

import meshlib as mtf
from hardware.slices import Slice
from meshlib.models import layout, preset, train_step
from meshlib.sharing.emission import flax_rules, haliax_mappings, partition_specs, python_lines

MESH = "fsdp:4;tensor:2"


def program_of(name: str = "fsdp+tensor") -> mtf.Program:
    config = preset("llama2-7b").reduced()
    with mtf.Graph():
        return mtf.lower(*train_step(config, 8, 16), MESH, layout(name, config, MESH))


def test_flax_gives_weights_the_axes_of_the_program() -> None:
    linen = pytest.importorskip("flax.linen")
    program = program_of()
    names: dict[str, object] = {}
    exec("\n".join(flax_rules(program).lines[1:]), names)
    for variable in program.variables.values():
        dims = variable.sharding.shape.names
        spec = linen.logical_to_mesh_axes(dims, names["rules"])
        shown = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        shown += [()] * (len(dims) - len(shown))
        assert shown == [variable.sharding.of(dim) for dim in dims], variable.tensor.name


def test_haliax_gives_weights_the_axes_of_the_program() -> None:
    haliax = pytest.importorskip("haliax", exc_type=ImportError, reason="Haliax and this JAX do not fit")
    program = program_of()
    names: dict[str, object] = {}
    emitted = haliax_mappings(program)
    exec("\n".join(emitted.lines[1:]), names)
    assert not emitted.missing
    for variable in program.variables.values():
        axes = tuple(haliax.Axis(d.name, d.size) for d in variable.sharding.shape)
        spec = haliax.partitioning.pspec_for_axis(axes, names["param_mapping"])
        shown = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        shown += [()] * (len(axes) - len(shown))
        assert shown == [variable.sharding.of(a.name) for a in axes], variable.tensor.name


def test_rules_that_yield_are_reported_where_a_target_has_none() -> None:
    assert any("length:tensor?" in what for what in haliax_mappings(program_of("fsdp+sequence")).missing)


def test_specs_are_those_of_the_program() -> None:
    jax = pytest.importorskip("jax")
    program = program_of()
    names: dict[str, object] = {}
    exec("\n".join(partition_specs(program).lines[1:]), names)
    specs = names["specs"]
    assert isinstance(specs, dict)
    assert specs["layers/feed_forward/wi/kernel"] == jax.sharding.PartitionSpec(None, "fsdp", "tensor")
    assert {*specs} == {*program.variables}


def test_python_makes_the_same_program(capsys: pytest.CaptureFixture[str]) -> None:
    config = preset("llama2-7b")
    with mtf.Graph():
        ours = mtf.lower(*train_step(config, 32, 2048), "fsdp:16", layout("fsdp", config, "fsdp:16"))
    text = python_lines(ours, Slice("v5e-16"), config, {"batch": 32, "length": 2048})
    names: dict[str, Any] = {}
    exec("\n".join(text.lines), names)
    theirs = names["program"]
    assert (theirs.mesh, str(theirs.layout)) == (ours.mesh, str(ours.layout))
    assert [c.sent_bytes for c in theirs.collectives] == [c.sent_bytes for c in ours.collectives]
    assert theirs.memory.by_kind == ours.memory.by_kind
    assert not text.missing
    assert capsys.readouterr().out
