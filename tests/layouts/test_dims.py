import copy
import pickle

import numpy as np
import pytest

from layouts import Dimension, LayoutError, MeshlibError, Shape


def test_dimension_is_a_value():
    d = Dimension("batch", np.int64(512))
    assert d == Dimension("batch", 512)
    assert hash(d) == hash(Dimension("batch", 512))
    assert type(d.size) is int
    assert str(d) == "batch:512"
    assert d != Dimension("batch", 256)
    assert d != "batch:512"
    with pytest.raises(AttributeError, match="immutable"):
        d.size = 3
    with pytest.raises(AttributeError, match="immutable"):
        del d.size
    assert not hasattr(d, "__dict__")


@pytest.mark.parametrize("name", ["", "a b", "1a", "a-b", None, 3])
def test_names_are_identifiers(name):
    with pytest.raises(LayoutError, match="not an identifier"):
        Dimension(name, 2)


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2", None, np.float32(2), np.bool_(True)])
def test_sizes_are_positive_integers(size):
    with pytest.raises(LayoutError, match=r"dimension 'd': the size must be"):
        Dimension("d", size)


@pytest.mark.parametrize(
    "source",
    [
        "batch:512;hidden:1024",
        "batch:512,hidden:1024",
        "batch:512.hidden:1024",
        " batch:512 \n hidden:1024;",
        [("batch", 512), ("hidden", 1024)],
        {"batch": 512, "hidden": 1024},
        (Dimension("batch", 512), ("hidden", 1024)),
        (Dimension(n, s) for n, s in [("batch", 512), ("hidden", 1024)]),
        Shape("batch:512;hidden:1024"),
    ],
)
def test_shape_sources(source):
    shape = Shape(source)
    assert str(shape) == "[batch:512, hidden:1024]"
    assert shape.names == ("batch", "hidden")
    assert shape.sizes == (512, 1024)
    assert shape.to_integer_list == [512, 1024]
    assert (shape.size, shape.ndim, len(shape)) == (512 * 1024, 2, 2)
    assert hash(shape) == hash(Shape("batch:512;hidden:1024"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("batch", "'batch' has no ':'"),
        ("batch:2:3", "'batch:2:3' has two ':'"),
        ("batch:x", "'batch': size 'x'"),
        ("batch:0", "'batch': size '0'"),
        ("batch:", "'batch': size ''"),
        ("a:2;9b:3", "'9b' is not an identifier"),
        ("a:2;a:3", "'a' occurs twice in one shape: a:2 and a:3"),
        ([("a", 2), 3], r"\(name, size\) pair for each (dimension|axis), not 3"),
        (7, "not 7"),
    ],
)
def test_shape_faults(source, message):
    with pytest.raises(LayoutError, match=message):
        Shape(source)


def test_caret_stands_under_the_fault():
    with pytest.raises(MeshlibError) as caught:
        Shape("batch:512\thidden:many")
    text, caret = caught.value.__notes__[0].splitlines()
    assert text[caret.index("^") :] == "many"


def test_scalar():
    assert (Shape("").size, Shape([]).ndim, str(Shape())) == (1, 0, "[]")


def test_indexing():
    shape = Shape("a:2;b:3;c:4")
    assert shape[1] == Dimension("b", 3)
    assert shape[-1].name == "c"
    assert shape[1:] == Shape("b:3;c:4")
    assert shape.index("c") == shape.index(Dimension("c", 4)) == 2
    assert shape.dim("b").size == 3
    assert "a" in shape
    assert Dimension("a", 2) in shape
    assert Dimension("a", 3) not in shape
    assert "d" not in shape
    with pytest.raises(LayoutError, match=r"'a' has size 2 in \[a:2, b:3, c:4\], not 3"):
        shape.index(Dimension("a", 3))
    with pytest.raises(LayoutError, match=r"'bb' in \[a:2, b:3, c:4\]; did you mean 'b'\?"):
        shape.dim("bb")


def test_what_code_for_mesh_tensorflow_does_with_shapes():
    shape, d, e = Shape("a:2;b:3;c:4"), Dimension("d", 5), Dimension("e", 6)
    assert Shape(shape.dims[:-1] + [d]) == Shape("a:2;b:3;d:5")  # noqa: RUF005
    assert Shape([d] + shape.dims[1:] + [e]) == Shape("d:5;b:3;c:4;e:6")  # noqa: RUF005
    assert shape[:-1] + [d] == Shape("a:2;b:3;d:5")  # noqa: RUF005
    assert shape - shape[1] == Shape("a:2;c:4")
    assert (shape.dims[0], shape.dims[-1], len(shape.dims)) == (Dimension("a", 2), Dimension("c", 4), 3)
    assert (shape.ndims, shape.dimension_names) == (3, ("a", "b", "c"))
    assert shape.get_dim_by_name("b") == Dimension("b", 3)
    assert shape.rename_dimension("b", "z") == Shape("a:2;z:3;c:4")
    assert shape.resize_dimension("b", 9) == Shape("a:2;b:9;c:4")
    assert shape.to_string == "a:2;b:3;c:4"
    assert Shape(shape.to_string) == shape
    with pytest.raises(LayoutError, match="'a' occurs twice in one shape: a:2 and a:2"):
        Shape(shape.dims + [Dimension("a", 2)])  # noqa: RUF005 - unlike the union of shapes
    with pytest.raises(LayoutError, match="no dimension 'bb'"):
        shape.get_dim_by_name("bb")


def test_algebra():
    a, b, c = Dimension("a", 2), Dimension("b", 3), Dimension("c", 4)
    one, two = [a], [b]  # lists on either side, as Mesh TensorFlow's users write them
    assert Shape(one) + two == Shape(one) + b == one + Shape(two) == a + Shape(two) == Shape([a, b])
    assert Shape([a, b]) + Shape([b, c]) == Shape([a, b, c])
    assert Shape([a, b, c]) - [b] == Shape([a, b, c]) - b == Shape([a, b, c]) - ["b"] == Shape([a, c])
    assert Shape([a, b]) - "b:3" == Shape([a, b]) - Shape([b, c]) == Shape([a])
    assert Shape([a, b]).rename("a", "z") == Shape("z:2;b:3")
    assert Shape([a, b]).resize("b", 9) == Shape("a:2;b:9")
    other = [("a", 5)]
    for clash in (lambda: Shape([a]) + other, lambda: Shape([a]) - other):
        with pytest.raises(LayoutError, match=r"'a' has two sizes, 2 in .* and 5"):
            clash()
    with pytest.raises(LayoutError, match="'b' occurs twice"):
        Shape([a, b]).rename("a", "b")


@pytest.mark.parametrize("value", [Dimension("a", 2), Shape("a:2;b:3")])
def test_copies_and_pickles(value):
    assert copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value
