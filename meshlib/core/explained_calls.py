"""Public functions and classes that explain calls which do not match their signatures.

Python's own TypeError names neither the user's line nor the accepted arguments. Arguments are checked only after a call
has failed, so that a valid call costs one extra frame.

A class is explained when its name is read, or when an explained call first returns one of its instances; with it the
types that its public attributes are annotated with.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, isclass, isfunction, signature
from itertools import takewhile
from typing import Any, ParamSpec, TypeAlias, TypeVar

from layouts.mesh import Mesh
from meshlib.core.errors import ArgumentError, nearest
from meshlib.core.foreign_names import OF_ARGUMENTS, OF_CALLS
from meshlib.core.source_lines import OWN, source_line

P = ParamSpec("P")
T = TypeVar("T")
Called: TypeAlias = tuple[str, Sequence[Callable[..., Any]], Sequence[object]]
SELF = ("self", "cls")
_KINDS = (
    Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.VAR_POSITIONAL, Parameter.KEYWORD_ONLY,
    Parameter.VAR_KEYWORD,
)  # fmt: skip


def explained_calls(
    package: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any] | None] = lambda function: None
) -> Callable[[Any], Any]:
    """A function from a value to its exported form: functions are wrapped, classes get wrapped methods.

    Args:
      package: its `__name__`.
      wrap: (function) -> a custom wrapper that calls `refuse_misfit` itself, or None for the default one.
    """
    calls: dict[object, Any] = {}  # aliases of one function share a wrapper

    def exported(value: Any) -> Any:
        if isclass(value):
            _explain_class(value, ("__init__",))
        elif isfunction(value) and value not in _EXPLAINED:  # already wrapped by another package
            if value not in calls:
                calls[value] = _exported(value, package, wrap(value))
            return calls[value]
        return value

    return exported


def explain_module(name: str) -> None:
    """Wrap the public functions and classes of a public module: called at its end with its name.

    `dir` then has what its `__all__` names.
    """
    module = sys.modules[name]
    if (names := getattr(module, "__all__", None)) is not None:
        vars(module)["__dir__"] = lambda: [*names]
    for shown, part in list(vars(module).items()):
        if shown.startswith("_") or getattr(part, "__module__", "") != name:
            continue
        if isclass(part):
            _explain_class(part, ("__init__",))
        elif isfunction(part) and not hasattr(part, "__wrapped__"):
            setattr(module, shown, _explaining(part, partial(_function_called, part)))


def refuse_misfit(
    fault: TypeError,
    name: str,
    functions: Sequence[Callable[..., Any]],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> None:
    """Raise ArgumentError if a call failed because its arguments do not match; return if it failed inside.

    Args:
      functions: the called function, and those to which it forwards its **kwargs.
    """
    if not isinstance(fault, ArgumentError) and (mismatch := _mismatch(functions, args, kwargs)):
        remedy = f"; {OF_CALLS[name]}" if name in OF_CALLS else _as_list(name, functions[0], args)
        raise ArgumentError(f"{name} ({source_line()}): {mismatch}{remedy}") from None


def _as_list(name: str, function: Callable[..., Any], args: Sequence[object]) -> str:
    """The remedy for operands given one by one instead of in a list, or ""."""
    if next(iter(signature(function).parameters), "") != "xs":
        return ""
    tensors = [str(getattr(x, "name", "")) for x in takewhile(lambda x: hasattr(x, "operation"), args)]
    return f"; tensors go in one list: {name}([{', '.join(tensors)}], ...)" if len(tensors) > 1 else ""


def refuse_mesh(function: Callable[..., Any], args: Sequence[object]) -> None:
    """Raise ArgumentError if the first argument of a failed call is a mesh, as in Mesh TensorFlow, or its graph."""
    if not args or {"mesh", "graph"} & {*signature(function).parameters}:
        return
    if isinstance(args[0], Mesh) or type(args[0]).__name__ == "Graph":
        name = function.__name__
        raise ArgumentError(f"{name} ({source_line()}): {OF_ARGUMENTS['mesh']}; leave it out: {name}(...)") from None


# ------------------------------------------------------------ wrappers


def _exported(function: Callable[..., Any], package: str, call: Callable[..., Any] | None) -> Callable[..., Any]:
    """The wrapper of a function, also bound where pickle looks the function up."""
    if call is not None:
        call.__module__ = package
        return call
    call = _explaining(function, partial(_function_called, function))
    home = sys.modules[function.__module__]
    if getattr(home, function.__name__, None) is function:
        setattr(home, function.__name__, call)
    return call


def _explaining(function: Callable[P, T], called: Callable[[tuple[Any, ...]], Called]) -> Callable[P, T]:
    """`function` with ArgumentError for mismatched calls; `called` returns the called functions and arguments."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        __tracebackhide__ = True  # pytest then shows the caller's line
        try:
            result = function(*args, **kwargs)
        except TypeError as fault:
            refuse_misfit(fault, *called(args), kwargs)
            raise
        if type(result) not in _MET:
            _meet(type(result))
        return result

    _EXPLAINED.add(checked)
    return checked


_EXPLAINED: set[object] = set()  # wrappers of functions and methods
_MET: set[type] = set()  # classes that need no more attention


def _meet(kind: type) -> None:
    """Explain a class of this library, and the types of its public attributes, once."""
    if kind in _MET:
        return
    _MET.add(kind)
    if kind.__module__.partition(".")[0] in OWN:
        _explain_class(kind)


def _explain_class(kind: type, more: Sequence[str] = ()) -> None:
    """Wrap the public methods of a class of this library and of its bases, and `more`."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in OWN:
            continue
        for name, method in list(vars(base).items()):
            function = method.__func__ if isinstance(method, staticmethod | classmethod) else method
            if not isfunction(function) or function in _EXPLAINED:
                continue
            if name in more:
                setattr(base, name, _explaining(method, _constructed))
            elif function is not method:
                called = partial(_function_called, function)
                setattr(base, name, type(method)(_explaining(function, called)))
            elif name == "__call__" or not name.startswith("_"):
                setattr(base, name, _explaining(method, partial(_method_called, method)))
        for attribute_type in _attribute_types(base):
            _meet(attribute_type)


def _attribute_types(kind: type) -> Iterator[type]:
    """The classes in annotations of a class's public attributes, as far as its module has them."""
    getters = {name: getattr(x, "fget", getattr(x, "func", None)) for name, x in vars(kind).items()}
    texts = {n: getattr(f, "__annotations__", {}).get("return") for n, f in getters.items()}
    texts |= vars(kind).get("__annotations__", {})
    known = vars(sys.modules[kind.__module__])
    for name, text in texts.items():
        words = re.findall(r"\w+", str(text)) if not name.startswith("_") else []
        yield from filter(isclass, map(known.get, words))
        if getters.get(name) and any(word[0].isupper() and word not in known for word in words):
            _meet_when_read(kind, name)


def _meet_when_read(kind: type, name: str) -> None:
    """Explain the class of a property's values when first read: its module imports that for type checkers alone."""
    getter = vars(kind)[name]

    def first(self: object) -> Any:
        setattr(kind, name, getter)
        value = getter.__get__(self, kind)
        for part in value if isinstance(value, tuple | list) else [value]:
            _meet(type(part))
        return value

    setattr(kind, name, property(first, doc=getter.__doc__))


def _function_called(function: Callable[..., Any], args: tuple[Any, ...]) -> Called:
    return function.__qualname__, [function], args


def _constructed(args: tuple[Any, ...]) -> Called:
    kind = type(args[0])
    return kind.__name__, [vars(k)["__init__"] for k in kind.__mro__[:-1] if "__init__" in vars(k)], args


def _method_called(method: Callable[..., Any], args: tuple[Any, ...]) -> Called:
    kind = type(args[0]).__name__ if args else ""
    return kind if method.__name__ == "__call__" else f"{kind}.{method.__name__}", [method], args


# ------------------------------------------------------------ mismatches


def _too_many(count: int, in_order: Sequence[str], by_name: Sequence[str]) -> str:
    """The fault of a call with too many positional arguments."""
    arguments = f"argument{'s' * (len(in_order) != 1)} by position ({', '.join(in_order)})"
    most = f"at most {len(in_order)} {arguments}" if in_order else "none by position"
    names = ", ".join(by_name)
    return f"it takes {most}, got {count}{f'; {names} go by name' if names else ''}"


def _by_kind(parameters: Mapping[str, Parameter]) -> dict[Any, list[str]]:
    """The names of public parameters of each kind, without self."""
    public = {n: p for n, p in parameters.items() if n not in SELF and not n.startswith("_")}
    return {kind: [n for n, p in public.items() if p.kind is kind] for kind in _KINDS}


def _mismatch(
    functions: Sequence[Callable[..., Any]], args: Sequence[object], kwargs: Mapping[str, object]
) -> str | None:
    """The mismatch between the arguments of a call and the signature, in words; None if they match."""
    parameters = _parameters(functions)
    by_kind = _by_kind(parameters)
    in_order = [*by_kind[Parameter.POSITIONAL_ONLY], *by_kind[Parameter.POSITIONAL_OR_KEYWORD]]
    known = [*in_order, *by_kind[Parameter.KEYWORD_ONLY]]
    count = len(args) - any(n in SELF for n in parameters)
    unknown = [] if by_kind[Parameter.VAR_KEYWORD] else [name for name in kwargs if name not in known]
    if unknown:
        remedy = OF_ARGUMENTS.get(unknown[0])
        hint = f"; {remedy}" if remedy else nearest(unknown[0], known)
        return f"no argument {unknown[0]!r:.80}{hint or _listed(known)}"
    if count > len(in_order) and not by_kind[Parameter.VAR_POSITIONAL]:
        return _too_many(count, in_order, by_kind[Parameter.KEYWORD_ONLY])
    if twice := [name for name in in_order[:count] if name in kwargs]:
        value = args[len(args) - count + in_order.index(twice[0])]
        hint = f"; is_training? {OF_ARGUMENTS['is_training']}" if isinstance(value, bool) else ""
        return f"'{twice[0]}' is given twice, by position ({value!r:.80}) and by name{hint}"
    given = {*in_order[:count], *kwargs}
    missing = [n for n in known if n not in given and parameters[n].default is Parameter.empty]
    if missing:
        return f"{' and '.join(repr(n) for n in missing)} must be given{_listed(known)}"
    return None


def _listed(known: Sequence[str]) -> str:
    return f"; it has {', '.join(known)}" if known else "; it has none"


def _parameters(functions: Sequence[Callable[..., Any]]) -> dict[str, Parameter]:
    """The parameters of the first function, merged with those of the functions that it forwards **kwargs to."""
    merged: dict[str, Parameter] = {}
    for n, function in enumerate(functions):
        own = signature(function).parameters
        hands_on = any(p.kind is Parameter.VAR_KEYWORD for p in own.values()) and n + 1 < len(functions)
        variadic = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        merged.update({k: p for k, p in own.items() if k not in merged and not (hands_on and p.kind in variadic)})
        if not hands_on:
            break
    return merged
