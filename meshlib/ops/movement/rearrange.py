"""rearrange, reduce and repeat: einops' patterns over named dims.

einops parses a pattern; here its axes are matched with the dims of a tensor in order. Dims are split into axes, which
are transposed, reduced or repeated, and merged again, by reshape, transpose, broadcast and the reductions: mesh axes
stay on the major part of split and merged dims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from einops import EinopsError
from einops.parsing import ParsedExpression

from layouts import Dimension, Shape
from meshlib.core.arguments import at, choice, whole
from meshlib.core.errors import LayoutError, ShapeError, nearest
from meshlib.core.graph import Tensor
from meshlib.core.names import free_name
from meshlib.core.source_lines import source_line
from meshlib.ops.building import tensor
from meshlib.ops.movement.runs import slice as slice_dim
from meshlib.ops.movement.shape import broadcast, reshape
from meshlib.ops.pointwise.cumulative import cumprod
from meshlib.ops.pointwise.reductions import reduce_all, reduce_any, reduce_max, reduce_mean, reduce_min, reduce_sum

Axis = object  # a name, or einops' object for a number, each unique, with the number as its `value`
Group = tuple[Axis, ...]  # the axes of one dim; empty for size 1
_ELLIPSIS = "…"  # as in einops' parser: in place of a group, or inside one


@dataclass(frozen=True)
class AxisPlan:
    """A pattern applied to one shape: dims split into axes, the axes in their new order, and merged dims."""

    split: Shape
    ordered: Shape
    result: Shape


def rearrange(
    x: Tensor, pattern: str, /, *, names: Mapping[str, str] | None = None, name: str | None = None, **sizes: int
) -> Tensor:
    """Reorder, split and merge dims, as `einops.rearrange` does with a pattern.

    The left side names the dims of x in order; `(h p)` splits a dim into two, major first. On the right side a name
    alone is a dim of that name. `(h w)` merges axes: the dim has its name on the left side if that has the same group,
    otherwise the names of its axes, `h_w`. Dims without a name, `1` or `()`, are called `_anonymous_N`, with N their
    position in the result. `...` stands for all dims that are not named.

    Args:
      x: any dtype.
      pattern: see above; https://einops.rocks describes the language.
      names: names of dims that differ from those in the pattern: `{"c": "channels", "h w": "length"}`.
      name: name of the result.
      sizes: sizes of axes that do not follow from the dims, `p=4`.
    Returns: the elements of x under other dims, sharded like a `reshape`.
    Raises: ShapeError for a pattern that does not parse or does not fit x; GraphError for an invalid size.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph():
      ...     images = mtf.input("images", [D("batch", 8), D("height", 32), D("width", 32), D("c", 3)])
      ...     pattern = "batch (h p) (w q) c -> batch (h w) (p q c)"
      ...     patches = mtf.rearrange(images, pattern, p=4, q=4, names={"h w": "length"})
      >>> print(patches.shape)
      [batch:8, length:64, p_q_c:48]

    Source: Rogozhnikov, "Einops: clear and reliable tensor manipulations with Einstein-like notation", ICLR 2022.
    """
    return _apply_plan(x, _plan("rearrange", x, pattern, sizes, names), name)


def repeat(
    x: Tensor, pattern: str, /, *, names: Mapping[str, str] | None = None, name: str | None = None, **sizes: int
) -> Tensor:
    """`rearrange` whose right side may have additional axes, over which x is repeated, like `einops.repeat`.

    Arguments, result and errors as in `rearrange`; a new axis is a number, or has its size in `sizes`.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [mtf.Dimension("height", 8), mtf.Dimension("width", 8)])
      ...     larger = mtf.repeat(x, "height width -> (height 2) (width q) c", q=3, c=5, names={"height 2": "height"})
      >>> print(larger.shape)
      [height:16, width_q:24, c:5]
    """
    return _apply_plan(x, _plan("repeat", x, pattern, sizes, names), name)


def reduce(
    x: Tensor,
    pattern: str,
    reduction: str,
    /,
    *,
    names: Mapping[str, str] | None = None,
    name: str | None = None,
    **sizes: int,
) -> Tensor:
    """`rearrange` whose right side may lack axes, over which x is reduced, like `einops.reduce`.

    Args:
      x: numbers; float for "mean", bool for "any" and "all".
      reduction: "sum", "mean", "max", "min" (ties share the gradient equally), "prod", "any" or "all".
      pattern, names, name, sizes: as in `rearrange`; a number that the right side lacks is a window size.
    Returns: as in `rearrange`; dtype of x.
    Raises: as in `rearrange`.
    Example:
      >>> import meshlib as mtf
      >>> D = mtf.Dimension
      >>> with mtf.Graph():
      ...     x = mtf.input("x", [D("batch", 8), D("height", 12), D("width", 12), D("channels", 3)])
      ...     print(mtf.reduce(x, "batch (height 2) (width 3) ... -> batch height width ...", "max").shape)
      [batch:8, height:6, width:4, channels:3]
    """
    chosen = choice(reduction, "reduce", "reduction", tuple(_REDUCTIONS))
    plan = _plan("reduce", x, pattern, sizes, names)
    if len(plan.ordered) == len(plan.split):
        return _apply_plan(x, plan, name)
    last = name if plan.ordered == plan.result else None
    return reshape(_REDUCTIONS[chosen](reshape(x, plan.split), output_shape=plan.ordered, name=last), plan.result, name)


def _apply_plan(x: Tensor, plan: AxisPlan, name: str | None) -> Tensor:
    """`x` split, transposed or repeated, and merged by the plan; the last operation gets the name."""
    merges = plan.ordered != plan.result
    orders = plan.split != plan.ordered
    split = reshape(x, plan.split, None if merges or orders else name)
    return reshape(broadcast(split, plan.ordered, None if merges else name), plan.result, name)


def _reduce_product(x: Tensor, output_shape: Shape, name: str | None = None) -> Tensor:
    """Product over dims: the last element of a cumulative product over all of them, merged into one."""
    gone = [d for d in x.shape if d not in output_shape]
    merged = Dimension(free_name("factors", x.shape.names), prod(d.size for d in gone))
    factors = reshape(broadcast(x, [*output_shape, *gone]), [*output_shape, merged])
    return reshape(slice_dim(cumprod(factors, merged), merged.size - 1, 1, merged.name), output_shape, name)


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": reduce_sum,
    "mean": reduce_mean,
    "max": reduce_max,
    "min": reduce_min,
    "prod": _reduce_product,
    "any": reduce_any,
    "all": reduce_all,
}


# ---------------------------------------------------------------- matching of pattern and shape


def _plan(what: str, x: Tensor, pattern: object, sizes: Mapping[str, int], names: object) -> AxisPlan:
    """The plan, or one error with the fault, the pattern and the operand."""
    shape = tensor(x, what).shape
    for axis, size in sizes.items():
        whole(size, what, f"the size of axis '{axis}'", low=1)
    if not isinstance(pattern, str):
        raise ShapeError(f"{at(what)}: the pattern must be a text, as in 'a b -> b a', got {pattern!r:.80}")
    try:
        left, right = _parsed(pattern, what)
        called = _name_of_group(names, left, right)
        known = {axis: int(size) for axis, size in sizes.items()}
        return _fitted(left, right, shape, known, called)
    except (ShapeError, LayoutError) as fault:
        raise ShapeError(f"{what} ({source_line()}): {fault}", f"pattern {pattern!r:.200}", x) from None


def _parsed(pattern: str, what: str) -> tuple[list[Group | str], list[Group | str]]:
    """The groups of both sides of a pattern."""
    sides = pattern.split("->")
    if len(sides) != 2:
        raise ShapeError(f"a pattern has one '->', this one {len(sides) - 1}")
    try:
        left, right = (ParsedExpression(side) for side in sides)
    except (EinopsError, ValueError) as fault:  # ValueError for a number that Python does not read
        raise ShapeError(" ".join(str(fault).split())) from None
    if left.has_ellipsis_parenthesized:
        raise ShapeError("'...' in parentheses on the left side: the split of a dim must be explicit")
    if right.has_ellipsis and not left.has_ellipsis:
        raise ShapeError("'...' on the right side only")
    lost = _shown(left.identifiers - right.identifiers)
    new = _shown(right.identifiers - left.identifiers)
    faults = []
    if lost and what != "reduce":
        faults.append(f"{lost} on the left side only; mtf.reduce removes axes")
    if new and what != "repeat":
        faults.append(f"{new} on the right side only; mtf.repeat makes new axes")
    if faults:
        raise ShapeError("; ".join(faults))
    return _groups(left), _groups(right)


def _groups(side: ParsedExpression) -> list[Group | str]:
    return [group if isinstance(group, str) else tuple(group) for group in side.composition]


def _shown(axes: set[Any]) -> str:
    return ", ".join(sorted(f"'{_text(a)}'" for a in axes))


def _text(axis: Axis) -> str:
    return "..." if axis == _ELLIPSIS else axis if isinstance(axis, str) else str(axis.value)  # type: ignore[attr-defined]


def _words(group: Group | str) -> str:
    return " ".join(map(_text, group))


def _name_of_group(names: object, left: Sequence[Group | str], right: Sequence[Group | str]) -> dict[str, str]:
    """`names` by normalised groups of the pattern."""
    if names is None:
        return {}
    if not isinstance(names, Mapping) or not all(isinstance(n, str) for pair in names.items() for n in pair):
        raise ShapeError(f"names must be a dict from parts of the pattern to names of dims, got {names!r:.80}")
    groups = [_words(g) for g in [*left, *right]]
    name_of_group = {
        " ".join(part.replace("(", " ").replace(")", " ").split()): called for part, called in names.items()
    }
    for part in name_of_group:
        if part not in groups:
            raise ShapeError(f"names has '{part}', which is not a dim of the pattern{nearest(part, groups)}")
    return name_of_group


def _fitted(
    left_side: list[Group | str],
    right_side: list[Group | str],
    shape: Shape,
    sizes: dict[str, int],
    called: dict[str, str],
) -> AxisPlan:
    left, right, rest = _without_ellipsis(left_side, right_side, shape)
    _check_names(left, shape, called, rest)
    axes = dict.fromkeys(a for group in (*left, *right) for a in group)
    for axis in sizes:
        if axis not in axes:
            known = [a for a in axes if isinstance(a, str) and a not in rest]
            raise ShapeError(
                f"the size of '{axis}' is given, which is not an axis of the pattern{nearest(axis, known)}"
            )
    of_axis = _sizes(left, right, shape, sizes)
    dims = _dims_of_axes(left, right, shape, of_axis)
    result = [
        Dimension(own, prod(of_axis[a] for a in group))
        for own, group in zip(_result_names(left, right, shape, called, rest), right, strict=True)
    ]
    split = Shape([dims[a] for group in left for a in group])
    return AxisPlan(split, Shape([dims[a] for group in right for a in group]), Shape(result))


def _dims_of_axes(
    left: Sequence[Group], right: Sequence[Group], shape: Shape, sizes: Mapping[Axis, int]
) -> dict[Axis, Dimension]:
    """The dim of each axis: an unsplit dim keeps its name and layout rules, axes keep theirs, numbers get a free
    name."""
    parts = [(a, d.name if len(group) == 1 else None) for group, d in zip(left, shape, strict=True) for a in group]
    parts += [(a, None) for group in right for a in group]
    taken = {a for a, _ in parts if isinstance(a, str)} | set(shape.names)
    dim_of_axis: dict[Axis, Dimension] = {}
    for axis, own in parts:
        if axis not in dim_of_axis:
            name = own or (axis if isinstance(axis, str) else free_name("part", taken))
            taken.add(name)
            dim_of_axis[axis] = Dimension(name, sizes[axis])
    return dim_of_axis


def _result_names(
    left: Sequence[Group], right: Sequence[Group], shape: Shape, called: Mapping[str, str], rest: Mapping[Axis, str]
) -> list[str]:
    merged = {_words(group): d.name for group, d in zip(left, shape, strict=True) if len(group) > 1}
    result_names = []
    for place, group in enumerate(right):
        words, names = _words(group), [rest.get(a, _text(a)) for a in group]
        if words in called:
            result_names.append(called[words])
        elif not group or (len(group) == 1 and not isinstance(group[0], str)):
            result_names.append(f"_anonymous_{place}")
        elif len(group) == 1:
            result_names.append(names[0])
        else:
            joined = "_".join(names)
            result_names.append(merged.get(words, joined if joined.isidentifier() else f"_{joined}"))
    return result_names


def _without_ellipsis(
    left: list[Group | str], right: list[Group | str], shape: Shape
) -> tuple[list[Group], list[Group], dict[Axis, str]]:
    """Both sides with the ellipsis expanded to one axis per dim, and the names of those dims."""
    named = sum(group != _ELLIPSIS for group in left)
    rest = len(shape) - named
    if rest < 0 or (rest > 0 and named == len(left)):
        raise ShapeError(f"the left side has {named} dims, but x has {len(shape)}; '...' stands for dims without names")
    begin = left.index(_ELLIPSIS) if _ELLIPSIS in left else 0
    # Names with a character that no axis of a pattern has.
    hidden_axes: dict[Axis, str] = {f"{_ELLIPSIS}{d.name}": d.name for d in shape.dims[begin : begin + rest]}

    def spread(groups: list[Group | str]) -> Iterator[Group]:
        for group in groups:
            if group == _ELLIPSIS:
                yield from ((axis,) for axis in hidden_axes)
            else:
                yield tuple(b for a in group for b in (hidden_axes if a == _ELLIPSIS else (a,)))

    return list(spread(left)), list(spread(right)), hidden_axes


def _check_names(left: list[Group], shape: Shape, called: dict[str, str], rest: Mapping[Axis, str]) -> None:
    """Raise ShapeError unless unsplit dims are named as in x, so that a typo cannot drop a layout rule."""
    faults = []
    for place, (group, d) in enumerate(zip(left, shape, strict=True)):
        if len(group) == 1 and isinstance(group[0], str) and group[0] not in rest:
            named = called.get(group[0], group[0])
            if named != d.name:
                elsewhere = " (which is elsewhere: a pattern has the dims in their order)" if named in shape else ""
                faults.append(
                    f"dim {place} of x is '{d.name}', but '{named}' in the pattern{elsewhere}; write '{d.name}', or "
                    f"names={{'{group[0]}': '{d.name}'}}"
                )
    if faults:
        raise ShapeError("; ".join(faults))


def _sizes(left: list[Group], right: list[Group], shape: Shape, given: Mapping[str, int]) -> dict[Axis, int]:
    """The size of every axis: given, written in the pattern, or inferred from the size of its dim."""
    known: dict[Axis, int] = {
        a: given[a] if isinstance(a, str) else int(a.value)  # type: ignore[attr-defined]
        for group in (*left, *right)
        for a in group
        if not isinstance(a, str) or a in given
    }
    faults = []
    for group, d in zip(left, shape, strict=True):
        if fault := _infer_axis(group, d, known):
            faults.append(fault)
    missing = dict.fromkeys(_text(a) for group in right for a in group if a not in known)
    split = {_text(a) for group in left for a in group}
    faults += [f"axis '{a}' is new: give its size, as in {a}=2" for a in missing if a not in split]
    if faults:
        raise ShapeError("; ".join(faults))
    return known


def _infer_axis(group: Group, d: Dimension, known: dict[Axis, int]) -> str | None:
    """Add the size of the one axis of `group` that is not in `known`, or return why dim `d` cannot be split so."""
    open_axes = [a for a in group if a not in known]
    product = prod(known[a] for a in group if a in known)
    sizes = ", ".join(f"{_text(a)}={known[a]}" for a in group if a in known)
    if len(open_axes) > 1:
        which = ", ".join(f"{_text(a)}=..." for a in open_axes[1:])
        return f"dim {d} is ({_words(group)}): give sizes of all its axes but one, as in {which}"
    if open_axes and d.size % product:
        return f"dim {d} is ({_words(group)}) with {sizes}: {d.size} % {product} = {d.size % product}"
    if open_axes:
        known[open_axes[0]] = d.size // product
    elif product != d.size:
        return f"dim {d} is ({_words(group)}) of {product} elements{f', with {sizes}' if sizes else ''}"
    return None
