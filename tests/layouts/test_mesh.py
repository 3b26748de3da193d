import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layouts import LayoutError, Mesh
from tests.layouts.strategies import meshes, properties


@pytest.mark.parametrize(
    "source", ["rows:2;cols:4", {"rows": 2, "cols": 4}, [("rows", 2), ("cols", 4)], Mesh("rows:2 cols:4")]
)
def test_sources(source):
    mesh = Mesh(source)
    assert (mesh.axes, mesh.sizes, mesh.size) == (("rows", "cols"), (2, 4), 8)
    assert str(mesh) == "rows:2;cols:4"
    assert mesh == Mesh(str(mesh)) == pickle.loads(pickle.dumps(mesh))
    assert hash(mesh) == hash(Mesh("rows:2;cols:4"))
    assert mesh != Mesh("cols:4;rows:2")
    assert mesh.index("cols") == 1
    assert "rows" in mesh
    assert len(mesh) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "at least one axis"),
        ([], "at least one axis"),
        ("rows:0", "'rows': size '0'"),
        ({"rows": 0}, "'rows': the size must be at least 1, not 0"),
        ({"rows": 2.0}, "must be an integer, not 2.0"),
        ({"rows": True}, "must be an integer, not True"),
        ("rows:2;rows:2", "'rows' occurs twice in one mesh: rows:2;rows:2"),
        ({"a-b": 2}, "'a-b' is not an identifier"),
    ],
)
def test_faults(source, message):
    with pytest.raises(LayoutError, match=message):
        Mesh(source)


def test_lookups_that_fail():
    mesh = Mesh("rows:2;cols:4")
    with pytest.raises(LayoutError, match=r"'row' in mesh rows:2;cols:4; did you mean 'rows'\?"):
        mesh.axis_size("row")
    for lookup in (lambda: mesh.coordinate(8), lambda: mesh.device((2, 0)), lambda: mesh.device((0,))):
        with pytest.raises(LayoutError, match="rows:2;cols:4"):
            lookup()
    with pytest.raises(LayoutError, match=r"does not name the axes .*'cols'"):
        mesh.device({"rows": 1})
    with pytest.raises(LayoutError, match="occurs twice"):
        mesh.groups(["rows", "rows"])


@properties
@given(meshes())
def test_devices_are_numbered_row_major(mesh):
    assert mesh.coordinates() == list(np.ndindex(*mesh.sizes))
    for device, coordinate in enumerate(mesh.coordinates()):
        assert mesh.coordinate(device) == coordinate
        assert mesh.device(coordinate) == device
        assert mesh.device(dict(zip(mesh.axes, coordinate, strict=True))) == device


@properties
@given(meshes(), st.data())
def test_groups_are_a_transpose(mesh, data):
    axes = data.draw(st.permutations(mesh.axes))[: data.draw(st.integers(0, len(mesh.axes)))]
    rest = [a for a in mesh.axes if a not in axes]
    devices = np.arange(mesh.size).reshape(mesh.sizes)
    expected = devices.transpose([mesh.index(a) for a in [*rest, *axes]]).reshape(-1, mesh.group_size(axes))
    assert mesh.groups(axes) == expected.tolist()
