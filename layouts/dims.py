"""Named dimensions and shapes.

A `Shape` is an ordered set of `Dimension`s: names are unique, so a name identifies a position. Both are immutable
and cache their hash, because shapes are looked up far more often than they are created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from numbers import Number
from typing import Any, SupportsIndex, TypeAlias, Union, overload

from layouts.cells import clipped, dimension_cell, shape_cell
from layouts.errors import LayoutError, nearest
from layouts.frozen import Frozen
from layouts.parsing import checked_name, checked_size, is_iterable, named_sizes


class Dimension(Frozen):
    """A name and a size.

    >>> from layouts import Dimension
    >>> Dimension("batch", 512)
    Dimension('batch', 512)
    >>> print(Dimension("batch", 512))
    batch:512
    """

    __slots__ = ("name", "size")

    name: str
    size: int

    def __init__(self, name: str, size: int) -> None:
        name = checked_name(name, "dimension")
        size = checked_size(size, name, "dimension")
        self._fill(name, size, name=name, size=size)

    def renamed(self, name: str) -> Dimension:
        """This dimension under another name.

        >>> from layouts import Dimension
        >>> print(Dimension("length", 8).renamed("memory_length"))
        memory_length:8
        """
        return Dimension(name, self.size)

    def _as_number(self, other: object) -> Any:
        if not isinstance(other, Number):
            return NotImplemented
        raise LayoutError(f"dimension {self} is a name and a size, not a number; take its .size")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = __mod__ = _as_number

    def __repr__(self) -> str:
        return clipped(f"Dimension({self.name!r}, {self.size})")

    def _repr_html_(self) -> str:
        return dimension_cell(self)

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


DimensionLike: TypeAlias = Dimension | tuple[str, int]
ShapeLike: TypeAlias = Union["Shape", str, Mapping[str, int], Iterable[DimensionLike]]


class Dims(tuple[Dimension, ...]):
    """The dims of a shape: a tuple that concatenates with lists, as code written for Mesh TensorFlow expects.

    >>> Shape("batch:8;d_model:4").dims[:-1] + [Dimension("heads", 2)]
    (Dimension('batch', 8), Dimension('heads', 2))
    """

    __slots__ = ()

    @overload
    def __getitem__(self, key: SupportsIndex) -> Dimension: ...
    @overload
    def __getitem__(self, key: slice) -> Dims: ...
    def __getitem__(self, key: SupportsIndex | slice) -> Dimension | Dims:
        item = tuple.__getitem__(self, key)
        return Dims(item) if isinstance(key, slice) else item  # type: ignore[arg-type,return-value]

    def __add__(self, other: Iterable[Dimension]) -> Dims:  # type: ignore[override]
        return Dims((*self, *other))

    def __radd__(self, other: Iterable[Dimension]) -> Dims:
        return Dims((*other, *self))


class Shape(Frozen):
    """An ordered set of dimensions.

    Args:
      dims: dimensions, (name, size) pairs, another shape, or text like "batch:512;hidden:1024".

    >>> from layouts import Dimension, Shape
    >>> shape = Shape("batch:512;hidden:1024")
    >>> print(shape, shape.size)
    [batch:512, hidden:1024] 524288
    >>> print(shape - ["batch"] + [Dimension("classes", 10)])
    [hidden:1024, classes:10]
    """

    __slots__ = ("_index", "dims", "names", "size", "sizes")

    dims: Dims
    names: tuple[str, ...]  # in order
    sizes: tuple[int, ...]  # in order: the shape of a NumPy array
    size: int
    _index: dict[str, int]

    def __init__(self, dims: ShapeLike = ()) -> None:
        own_dims = _dimensions(dims)
        index = {d.name: i for i, d in enumerate(own_dims)}
        if len(index) != len(own_dims):
            twice = next(d for i, d in enumerate(own_dims) if index[d.name] != i)
            sizes = " and ".join(str(d) for d in own_dims if d.name == twice.name)
            raise LayoutError(f"dimension {twice.name!r} occurs twice in one shape: {sizes}; rename one")
        own_dims = own_dims if isinstance(own_dims, Dims) else Dims(own_dims)
        lengths = tuple(d.size for d in own_dims)
        self._fill(own_dims, dims=own_dims, names=tuple(index), sizes=lengths, size=prod(lengths), _index=index)

    @property
    def to_integer_list(self) -> list[int]:
        """The sizes as a list (Mesh TensorFlow's name)."""
        return [d.size for d in self.dims]

    @property
    def to_string(self) -> str:
        """The dims as text that parses to the same shape: "batch:512;hidden:1024"."""
        return ";".join(map(str, self.dims))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.dims)

    def index(self, dim: str | Dimension) -> int:
        """Position of a dimension, given by name, or by name and size.

        >>> from layouts import Shape
        >>> Shape("batch:512;hidden:1024").index("hiden")
        Traceback (most recent call last):
        layouts.errors.LayoutError: no dimension 'hiden' in [batch:512, hidden:1024]; did you mean 'hidden'?
        """
        name = dim.name if isinstance(dim, Dimension) else dim
        position = self._index.get(name)
        if position is None:
            raise LayoutError(f"no dimension {name!r} in {self}{nearest(name, self._index)}")
        if isinstance(dim, Dimension) and self.dims[position].size != dim.size:
            raise LayoutError(f"dimension {name!r} has size {self.dims[position].size} in {self}, not {dim.size}")
        return position

    def dim(self, name: str) -> Dimension:
        """The dimension with that name."""
        return tuple.__getitem__(self.dims, self.index(name))

    def rename(self, old: str | Dimension, new: str) -> Shape:
        """This shape with one dimension renamed.

        >>> from layouts import Shape
        >>> print(Shape("length:8;d:4").rename("length", "memory_length"))
        [memory_length:8, d:4]
        """
        at = self.index(old)
        return Shape((*self.dims[:at], self.dims[at].renamed(new), *self.dims[at + 1 :]))

    def resize(self, name: str | Dimension, size: int) -> Shape:
        """This shape with one dimension resized.

        >>> from layouts import Shape
        >>> print(Shape("length:8;d:4").resize("length", 2))
        [length:2, d:4]
        """
        at = self.index(name)
        return Shape((*self.dims[:at], Dimension(self.dims[at].name, size), *self.dims[at + 1 :]))

    @property
    def dimension_names(self) -> tuple[str, ...]:
        """`names` (Mesh TensorFlow's name)."""
        return self.names

    # Aliases under Mesh TensorFlow's names.
    ndims = ndim
    get_dim_by_name, rename_dimension, resize_dimension = dim, rename, resize

    def __iter__(self) -> Iterator[Dimension]:
        return iter(self.dims)

    def __len__(self) -> int:
        return len(self.dims)

    @overload
    def __getitem__(self, key: int) -> Dimension: ...
    @overload
    def __getitem__(self, key: slice) -> Shape: ...
    def __getitem__(self, key: int | slice) -> Dimension | Shape:
        item = tuple.__getitem__(self.dims, key)
        return Shape(item) if isinstance(key, slice) else item  # type: ignore[arg-type,return-value]

    def __contains__(self, dim: object) -> bool:
        """By name, or by name and size for a Dimension."""
        if isinstance(dim, Dimension):
            at = self._index.get(dim.name)
            return at is not None and self.dims[at].size == dim.size
        return dim in self._index

    def __add__(self, other: ShapeLike | Dimension) -> Shape:
        """The union in order; existing dimensions keep their positions."""
        extra = (other,) if isinstance(other, Dimension) else _dimensions(other)
        return Shape(self.dims + tuple(d for d in extra if not self._has(d)))

    def __radd__(self, other: ShapeLike | Dimension) -> Shape:
        return Shape((other,) if isinstance(other, Dimension) else other) + self

    def __sub__(self, other: Dimension | Iterable[str | DimensionLike]) -> Shape:
        """Without the given dimensions; missing ones are ignored."""
        if isinstance(other, Dimension):
            other = (other,)
        elif isinstance(other, str):
            other = _dimensions(other)
        gone = set()
        for d in other:
            if isinstance(d, tuple):
                d = Dimension(*d)
            if isinstance(d, Dimension):
                self._has(d)  # another size under the same name is an error, not another dimension
            gone.add(d if isinstance(d, str) else d.name)
        return Shape(d for d in self.dims if d.name not in gone)

    def _has(self, dim: Dimension) -> bool:
        at = self._index.get(dim.name)
        if at is None:
            return False
        if self.dims[at].size != dim.size:
            raise LayoutError(
                f"dimension {dim.name!r} has two sizes, {self.dims[at].size} in {self} and {dim.size}; "
                "rename one or make them equal"
            )
        return True

    def _repr_html_(self) -> str:
        return shape_cell(self)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]"

    def __repr__(self) -> str:
        return clipped(f"Shape({self.to_string!r})")


def _dimensions(source: ShapeLike) -> tuple[Dimension, ...]:
    if isinstance(source, Shape):
        return source.dims
    if not isinstance(source, str | Mapping) and is_iterable(source):
        source = tuple(source)
        if all(isinstance(d, Dimension) for d in source):
            return source  # type: ignore[return-value]
    return tuple(Dimension(name, size) for name, size in named_sizes(source, "dimension"))
