import pickle

import numpy as np
import pytest
from hypothesis import given

from layouts import LayoutError, Mesh, Shape, Sharding
from tests.layouts.oracle import block_of
from tests.layouts.strategies import properties, shardings

MESH = Mesh("x:2;y:3;z:4")


@properties
@given(shardings())
def test_blocks_tile_the_tensor(s):
    whole = np.arange(s.shape.size).reshape(s.shape.sizes)
    seen = {}
    for device, coordinate in enumerate(s.mesh.coordinates()):
        block = whole[s.slices(coordinate)]
        assert s.slices(coordinate) == block_of(s, device)
        assert s.slices(dict(zip(s.mesh.axes, coordinate, strict=True))) == s.slices(coordinate)
        assert block.shape == s.local_shape.sizes
        assert block.size == s.local_size
        assert s.offsets(coordinate) == tuple(cut.start for cut in s.slices(coordinate))
        seen.setdefault(s.block_index(coordinate), (block, []))[1].append(device)
    elements = np.concatenate([block.ravel() for block, _ in seen.values()])
    assert sorted(elements) == list(range(whole.size))  # each exactly once
    assert sorted(seen) == list(np.ndindex(*s.block_counts))
    for index, (_, devices) in seen.items():
        assert s.holders(index) == tuple(devices)


@properties
@given(shardings())
def test_is_a_value(s):
    again = Sharding(s.shape, s.mesh, s.axes, s.pending)
    assert again is s is pickle.loads(pickle.dumps(s))  # equal ones are one
    assert s.with_axes(s.axes) == s.with_pending(s.pending) == s
    assert s.drop_pending().pending == ()
    assert s.split_axes.isdisjoint(s.pending_axes)


def test_reading():
    s = Sharding("batch:12;hidden:8", MESH, [("y", "x"), ("z",)])
    assert str(s) == "[batch:12@y+x, hidden:8@z]"
    assert s.of("batch") == ("y", "x")
    assert s.block_counts == (6, 4)
    assert s.local_shape == Shape("batch:2;hidden:2")
    assert s.block_index((1, 2, 3)) == (2 * 2 + 1, 3)
    with pytest.raises(LayoutError, match="did you mean 'hidden'"):
        s.of("hiden")
    with pytest.raises(LayoutError, match="no block"):
        s.holders((6, 0))
    with pytest.raises(LayoutError, match="outside mesh"):
        s.block_index((2, 0, 0))


def test_pending():
    s = Sharding("n:4", MESH, [()], {"z": "sum", "x": "sum"})
    assert s.pending == (("x", "sum"), ("z", "sum"))  # in mesh order
    assert str(s) == "[n:4] {sum over x+z}"
    assert s.drop_pending(["x"]).pending_axes == ("z",)
    assert s != s.drop_pending()
    assert Sharding.replicated("n:4", MESH) == s.drop_pending()
    assert str(s.with_pending([("y", "max")])) == "[n:4] {max over y}"


def test_axes_of_size_one_are_dropped():
    s = Sharding("n:4", "one:1;two:2", [("one", "two")])
    assert s == Sharding("n:4", "one:1;two:2", [("two",)], {"one": "sum"})


@pytest.mark.parametrize(
    ("axes", "pending", "message"),
    [
        ([("x",)], (), "1 entries of axes for the 2 dimensions"),
        ([("x",), ("x",)], (), "'x' is used 2 times: by dim 'a' and by dim 'b'"),
        ([("x", "x"), ()], (), "'x' is used 2 times"),
        ([("x",), ()], {"x": "sum"}, "by dim 'a' and by a pending sum"),
        ([(), ()], [("x", "sum"), ("x", "sum")], "'x' is used 2 times"),
        ([("w",), ()], (), "no axis 'w' in the mesh"),
        ([(), ()], {"xx": "sum"}, r"no axis 'xx' in the mesh; did you mean 'x'\?"),
        ([("z",), ()], (), "'a' does not divide over z: 6 % 4 = 2"),
        ([("x", "z"), ()], (), r"'a' does not divide over x\+z: 6 % 8 = 6"),
        ([(), ()], {"x": "mean"}, "'mean' is not one of sum, max, min"),
        ([(), ()], {"x": "sum", "y": "max"}, "sum over x, max over y; reduce one first"),
    ],
)
def test_faults(axes, pending, message):
    with pytest.raises(LayoutError, match=message):
        Sharding("a:6;b:6", MESH, axes, pending)


def test_all_faults_at_once():
    with pytest.raises(LayoutError, match=r"(?s)6 % 4 = 2.*no axis 'w'"):
        Sharding("a:6;b:6", MESH, [("z",), ("w",)])
