"""Layouts that have names.

Each function returns ordinary `LayoutRules` for the names that a program gives its dimensions and a mesh
its axes; nothing here could not be written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from types import MappingProxyType

from layouts.errors import LayoutError, nearest
from layouts.rules import LayoutRules, Rule


def data_parallel(batch: str = "batch", axis: str = "data") -> LayoutRules:
    """Each device has its part of the batch and all of the variables.

    >>> print(data_parallel())
    batch:data
    """
    return LayoutRules([(batch, axis)])


def model_parallel(dims: Iterable[str] = ("hidden",), axis: str = "model") -> LayoutRules:
    """Each device has its part of the layers and the whole batch.

    Name dimensions of which no two meet in one tensor, such as heads, hidden and vocab.

    >>> print(model_parallel(["heads", "hidden"]))
    heads:model;hidden:model
    """
    return LayoutRules([(dim, axis) for dim in _several(dims)])


def two_dimensional(
    batch: str = "batch",
    dims: Iterable[str] = ("hidden",),
    data_axis: str = "data",
    model_axis: str = "model",
) -> LayoutRules:
    """Data-parallel over one axis, model-parallel over the other.

    >>> print(two_dimensional())
    batch:data;hidden:model
    """
    return LayoutRules([(batch, data_axis), *((dim, model_axis) for dim in _several(dims))])


def fully_sharded(batch: str = "batch", dims: Iterable[str] = ("d_model",), axis: str = "data") -> LayoutRules:
    """Activations are split by batch; variables, which have no batch, by the first of `dims` they have.

    >>> print(fully_sharded(dims=["d_model", "d_ff"]))
    batch:data;d_model:data?;d_ff:data?
    """
    return LayoutRules([(batch, axis), *((dim, f"{axis}?") for dim in _several(dims))])


def zero1(batch: str = "batch", dims: Iterable[str] = ("d_model",), axis: str = "data") -> LayoutRules:
    """Data-parallel, but each device keeps and updates only its part of the optimizer's slots.

    >>> print(zero1())
    batch:data;slots/d_model:data?
    >>> zero1().sharding("d_model:8", "data:2", scope="slots").of("d_model")
    ('data',)
    """
    slots = [Rule(dim, (axis,), optional=True, scope="slots") for dim in _several(dims)]
    return LayoutRules([Rule(batch, (axis,)), *slots])


PRESETS: MappingProxyType[str, Callable[..., LayoutRules]] = MappingProxyType(
    {made.__name__: made for made in (data_parallel, model_parallel, two_dimensional, fully_sharded, zero1)}
)


def preset(name: str, **kwargs: object) -> LayoutRules:
    """The layout of that name, with the arguments of its function.

    >>> print(preset("data_parallel", axis="rows"))
    batch:rows
    >>> preset("data_paralel")
    Traceback (most recent call last):
    layouts.errors.LayoutError: no preset 'data_paralel'; did you mean 'data_parallel'?
    """
    if name not in PRESETS:
        raise LayoutError(f"no preset {name!r}{nearest(name, PRESETS) or _among(PRESETS)}")
    accepted = signature(PRESETS[name]).parameters
    for argument in kwargs:
        if argument not in accepted:
            hint = nearest(argument, accepted) or _among(accepted)
            raise LayoutError(f"preset {name!r} has no argument {argument!r}{hint}")
    return PRESETS[name](**kwargs)


def _among(names: Iterable[str]) -> str:
    return f"; there are {', '.join(names)}"


def _several(dims: Iterable[str]) -> tuple[str, ...]:
    return (dims,) if isinstance(dims, str) else tuple(dims)  # "hidden" is a name, not six letters
