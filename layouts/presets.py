"""Named layouts.

Each function returns ordinary `LayoutRules` for given names of dimensions and axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from types import MappingProxyType

from layouts.errors import LayoutError, nearest
from layouts.rules import LayoutRules, Rule


def data_parallel(batch: str = "batch", axis: str = "data") -> LayoutRules:
    """Data parallelism: each device has its part of the batch and all variables.

    >>> from layouts import data_parallel
    >>> print(data_parallel())
    batch:data
    """
    return LayoutRules([(batch, axis)])


def model_parallel(dims: Iterable[str] = ("hidden",), axis: str = "model") -> LayoutRules:
    """Model parallelism: each device has its part of the layers and the whole batch.

    Use dimensions of which no two occur in one tensor, such as heads, hidden and vocab.

    >>> from layouts import model_parallel
    >>> print(model_parallel(["heads", "hidden"]))
    heads:model;hidden:model
    """
    return LayoutRules([(dim, axis) for dim in _several(dims)])


def two_dimensional(
    batch: str = "batch", dims: Iterable[str] = ("hidden",), data_axis: str = "data", model_axis: str = "model"
) -> LayoutRules:
    """Data parallelism over one axis, model parallelism over the other.

    >>> from layouts import two_dimensional
    >>> print(two_dimensional())
    batch:data;hidden:model
    """
    return LayoutRules([(batch, data_axis), *((dim, model_axis) for dim in _several(dims))])


def fully_sharded(batch: str = "batch", dims: Iterable[str] = ("d_model",), axis: str = "data") -> LayoutRules:
    """Fully sharded data parallelism: activations are split by batch, variables by the first of `dims` they have.

    >>> from layouts import fully_sharded
    >>> print(fully_sharded(dims=["d_model", "d_ff"]))
    batch:data;d_model:data?;d_ff:data?
    """
    return LayoutRules([(batch, axis), *((dim, f"{axis}?") for dim in _several(dims))])


def zero1(batch: str = "batch", dims: Iterable[str] = ("d_model",), axis: str = "data") -> LayoutRules:
    """Data parallelism in which each device stores and updates only its part of the optimizer's slots (ZeRO-1).

    >>> from layouts import zero1
    >>> print(zero1())
    batch:data;slots/d_model:data?
    >>> zero1().sharding("d_model:8", "data:2", scope="slots").of("d_model")
    ('data',)
    """
    slots = [Rule(dim, (axis,), optional=True, scope="slots") for dim in _several(dims)]
    return LayoutRules([Rule(batch, (axis,)), *slots])


def sequence_parallel(dims: Iterable[str] = ("hidden",), length: str = "length", axis: str = "model") -> LayoutRules:
    """Model parallelism that also splits the sequence where no model dim takes the axis: norms, residuals, dropout.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

    >>> from layouts import sequence_parallel
    >>> print(sequence_parallel(["heads", "d_ff"]))
    heads:model;d_ff:model;length:model?
    """
    return joined(model_parallel(dims, axis), LayoutRules([(length, f"{axis}?")]))


def context_parallel(length: str = "length", axis: str = "context") -> LayoutRules:
    """Context parallelism: each device has its part of every sequence; keys and values have another name and are
    gathered.

    >>> from layouts import context_parallel
    >>> print(context_parallel())
    length:context
    """
    return LayoutRules([(length, axis)])


def joined(*layouts: LayoutRules) -> LayoutRules:
    """Several layouts combined: a dim that several of them split takes the axes of all, in order.

    >>> from layouts import data_parallel, fully_sharded, joined, model_parallel, zero1
    >>> print(joined(data_parallel(), fully_sharded(axis="fsdp"), model_parallel(["d_ff"])))
    batch:data+fsdp;d_model:fsdp?;d_ff:model
    >>> print(joined(zero1(dims=["d_model", "d_ff"]), model_parallel(["d_ff"])))  # slots keep what variables have
    batch:data;slots/d_model:data?;slots/d_ff:data?;slots/d_ff:model;d_ff:model
    """
    rules: list[Rule] = []
    places: dict[tuple[str | None, str], int] = {}
    for rule in (rule for layout in layouts for rule in (*layout.rules, *_replaced(layout, layouts))):
        key = (rule.scope, rule.dim)
        if rule.optional or key not in places:
            if not rule.optional:
                places[key] = len(rules)
            rules.append(rule)
        else:
            before = rules[places[key]]
            rules[places[key]] = Rule(rule.dim, tuple(dict.fromkeys((*before.axes, *rule.axes))), scope=rule.scope)
    return LayoutRules(list(dict.fromkeys(rules)))


def _replaced(layout: LayoutRules, layouts: Iterable[LayoutRules]) -> list[Rule]:
    """Copies of the other layouts' rules, in the scopes in which `layout` has rules that would otherwise replace
    them."""
    return [
        Rule(rule.dim, rule.axes, rule.optional, scoped.scope, rule.whole)
        for scoped in layout.rules
        if scoped.scope is not None
        for other in layouts
        if other is not layout
        for rule in other.rules
        if rule.scope is None and rule.dim == scoped.dim
    ]


_NAMED = (data_parallel, model_parallel, two_dimensional, fully_sharded, zero1, sequence_parallel, context_parallel)
PRESETS: MappingProxyType[str, Callable[..., LayoutRules]] = MappingProxyType({f.__name__: f for f in _NAMED})


def preset(name: str, **kwargs: object) -> LayoutRules:
    """The layout with that name, with the arguments of its function.

    >>> from layouts import preset
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
