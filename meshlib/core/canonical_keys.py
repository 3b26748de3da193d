"""Canonical keys: equal for equal values, in every process, on every machine and at any time.

Caches that outlive a run or a program are indexed by such keys. A key is a digest of

    values      numbers bit by bit, text, arrays by content, containers, enumerations, records by their fields
    functions   their code, defaults, closure, and the globals that the code names, by value; not where they are written
    graphs      operations in order: kind, name, attributes, region, wiring, types; the bodies of loops alike
    objects     their class and their pickled state
    libraries   the imported name and the library's version; for this library also a digest of its source

Objects that can't be pickled (a lock, a generator, an open file) have no key and are refused.
"""

from __future__ import annotations

import builtins
import copyreg
import dis
import enum
import functools
import hashlib
import importlib
import operator
import struct
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from layouts.frozen import Frozen
from meshlib.core.errors import GraphError
from meshlib.core.graph import Graph, Operation, Tensor
from meshlib.core.opdef import OpDef
from meshlib.core.source_lines import OWN

MOST_DEPTH = 100  # depth of nested containers
_GRAPH_TABLES = ("variables", "inputs", "gradient_of", "known")


def key_of(what: str, *parts: object) -> str:
    """The key of `parts` as 32 hexadecimal digits; `what` begins error messages.

    Raises: GraphError for an object without a key, with the path to it.
    Example:
      >>> key_of("search", [1, 2.0]) == key_of("search", [1, 2.0]), key_of("search", 1) == key_of("search", 1.0)
      (True, False)
      >>> by = lambda n: lambda x: x * n
      >>> key_of("search", by(2)) == key_of("search", by(2)), key_of("search", by(2)) == key_of("search", by(3))
      (True, False)
      >>> key_of("search", 0.0) == key_of("search", -0.0)
      False
    """
    return _Encoder(what).digest(parts)


@functools.cache
def library_key() -> str:
    """The version of this library: its number and a digest of its source, which changes when a checkout is edited."""
    try:
        number = metadata.version("meshlib-tpu")
    except metadata.PackageNotFoundError:
        number = "not installed"
    total = hashlib.sha256()
    for name in OWN:
        root = Path(str(sys.modules[name].__file__)).parent
        for path in sorted(root.rglob("*.py")):
            total.update(f"{name}/{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return f"{number}+{total.hexdigest()[:16]}"


class _NoKeyError(Exception):
    """Raised for an object without a key; `args` are the object and the reason."""


class _Encoder:
    """Feeds a canonical encoding to a hash: each item begins with a tag and its length.

    Functions, classes and operations are encoded once and referred to by number afterwards; numbers are canonical,
    since the order of the traversal is. Values are encoded each time: whether two equal ones are the same object is
    arbitrary.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.hash = hashlib.sha256()
        self.met: dict[int, int] = {}
        self.alive: list[object] = []  # keeps every visited object alive, so that no id is reused
        self.inside: dict[int, int] = {}  # ids of the values being encoded, with their depth
        self.frozen: dict[Frozen, bytes] = {}
        self.path: list[str] = []

    def digest(self, parts: Iterable[object]) -> str:
        """The key of all parts."""
        try:
            for part in parts:
                self.add(part)
        except _NoKeyError as fault:
            refused, why = fault.args
            where = f" in {' > '.join(self.path[:6])}" if self.path else ""
            raise GraphError(
                f"{self.what}: {refused!r:.80}{where} has no key ({why}), so no file can say whether it is the "
                "same in the next run; use plain data, or functions of plain data"
            ) from None
        return self.hash.hexdigest()[:32]

    # ------------------------------------------------------------ dispatch

    def add(self, x: Any) -> None:
        """Encode any value that has a key."""
        plain = _PLAIN.get(type(x))
        if plain is not None:
            self._write(*plain(x))
        elif id(x) in self.met:
            self._write("met", str(self.met[id(x)]).encode())
        elif id(x) in self.inside:
            self._write("inside", str(self.inside[id(x)]).encode())
        elif len(self.inside) >= MOST_DEPTH:
            raise _NoKeyError(x, f"it is nested {MOST_DEPTH} deep")
        else:
            self.inside[id(x)] = len(self.inside)
            self._add_object(x)
            del self.inside[id(x)]

    def _add_object(self, x: Any) -> None:
        for kind, encode in _OBJECTS:
            if isinstance(x, kind):
                encode(self, x)
                return
        if is_dataclass(x):
            self._class(type(x))
            for f in fields(x):
                self._encode_named(f.name, getattr(x, f.name, None))
            self._instance_attributes(x, [f.name for f in fields(x)])
            return
        self._pickled_state(x)

    def _instance_attributes(self, x: Any, written: Collection[str] = ()) -> None:
        """Encode the instance attributes of an object of a user-defined class, such as a subclass of list."""
        if _library_version(type(x).__module__) is None:
            for name, value in getattr(x, "__dict__", {}).items():
                if name not in written and not isinstance(getattr(type(x), name, None), functools.cached_property):
                    self._encode_named(name, value)

    def _assign_number(self, x: object) -> None:
        self.met[id(x)] = len(self.met)
        self.alive.append(x)

    def _write(self, tag: str, data: bytes) -> None:
        self.hash.update(f"{tag}:{len(data)}:".encode() + data)

    def _encode_named(self, name: str, x: Any) -> None:
        self._write("name", name.encode(errors="surrogatepass"))
        self.path.append(name)
        self.add(x)
        self.path.pop()

    # ------------------------------------------------------------ containers and values

    def _sequence(self, x: Iterable[Any]) -> None:
        items = list(x)
        self._class(type(x))
        self._write("items", str(len(items)).encode())
        for n, item in enumerate(items):
            self._encode_named(str(n), item)
        self._instance_attributes(x)

    def _mapping(self, x: Mapping[Any, Any]) -> None:
        self._class(type(x))
        self._write("items", str(len(x)).encode())
        if isinstance(x, defaultdict):
            self._encode_named("default", x.default_factory)
        for n, (name, value) in enumerate(x.items()):
            self.add(name)
            self._encode_named(name if isinstance(name, str) else str(n), value)
        self._instance_attributes(x)

    def _set(self, x: Iterable[Any]) -> None:
        """Encode a set: the sorted keys of its elements."""
        self._class(type(x))
        for one in sorted(_Encoder(self.what)._digest_one(item) for item in x):
            self._write("element", one.encode())
        self._instance_attributes(x)

    def _digest_one(self, x: object) -> str:
        self.add(x)
        return self.hash.hexdigest()

    def _array(self, x: np.ndarray[Any, Any]) -> None:
        if x.dtype.hasobject:
            self._write("objects", repr(x.shape).encode())
            self._sequence(x.reshape(-1).tolist())
            return
        self._write("array", f"{x.dtype.str} {x.dtype.name} {x.shape}".encode())
        self._write("bytes", np.ascontiguousarray(x).tobytes())

    def _scalar(self, x: np.generic) -> None:
        self._write("scalar", f"{x.dtype.str} {x.dtype.name}".encode())
        self._write("bytes", x.tobytes())

    def _frozen(self, x: Frozen) -> None:
        """Encode a Shape, Mesh or LayoutRules; digests are cached by value, since equal ones are common."""
        if x not in self.frozen:
            alone = _Encoder(self.what)
            alone._pickled_state(x)
            self.frozen[x] = alone.hash.digest()
        self._write("frozen", self.frozen[x])

    def _enum(self, x: enum.Enum) -> None:
        self._class(type(x))
        self._write("member", x.name.encode())

    def _pickled_state(self, x: Any) -> None:
        """Encode the pickled state of an object."""
        try:
            reduced = x.__reduce_ex__(4)
        except Exception as fault:
            raise _NoKeyError(x, f"it can't be pickled: {str(fault)[:100] or type(fault).__name__}") from None
        self._class(type(x))
        if isinstance(reduced, str):
            self._write("global", reduced.encode())
            return
        constructor, arguments, *rest = tuple(reduced)
        self._encode_named("made by", constructor if constructor is not copyreg.__newobj__ else "new")  # type: ignore[attr-defined]
        self._encode_named("arguments", arguments)
        state, items, pairs, *_ = [*rest, None, None, None]
        self._encode_named("state", state)
        self._encode_named("items", None if items is None else list(items))
        self._encode_named("pairs", None if pairs is None else list(pairs))

    # ------------------------------------------------------------ functions, classes, modules

    def _function(self, f: types.FunctionType) -> None:
        self._assign_number(f)
        version = _library_version(f.__globals__.get("__name__"))
        if version and f.__closure__ is None and "<" not in f.__qualname__:
            self._write("library function", f"{f.__module__}.{f.__qualname__} {version}".encode())
            return
        self.path.append(f"function {f.__qualname__}")
        self._encode_named("defaults", f.__defaults__)
        self._encode_named("keyword defaults", f.__kwdefaults__)
        self._encode_named("attributes", {n: v for n, v in vars(f).items() if n != "__wrapped__"})
        self._code(f.__code__)
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # an unassigned cell
                self._write("empty cell", name.encode())
                continue
            self._encode_named(name, value)
        if version:
            self._write("version", version.encode())
        else:
            self._globals(f.__code__, f.__globals__)
        self.path.pop()

    def _code(self, code: types.CodeType) -> None:
        """Encode the bytecode of a function, without its file and line numbers."""
        self._write("code", code.co_code)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._write(
            "code", repr((counts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode()
        )
        self._write("code", code.co_exceptiontable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.add(constant)

    def _globals(self, code: types.CodeType, around: Mapping[str, Any]) -> None:
        """Encode the globals that code refers to, including attributes of modules and local imports."""
        taken, imported = _outside_names(code)
        for name, *attributes in sorted(taken):
            if name not in around:
                self._write("builtin" if hasattr(builtins, name) else "undefined", name.encode())
                continue
            value = around[name]
            for attribute in attributes:
                if not isinstance(value, types.ModuleType) or _library_version(value.__name__):
                    break
                self._encode_named(name, value)
                name, value = f"{name}.{attribute}", getattr(value, attribute, None)
            self._encode_named(name, value)
        for name in sorted(imported):
            module = sys.modules.get(name) or importlib.import_module(name)
            self._encode_named(name, module)
            if _library_version(module.__name__) is None:
                for attribute in sorted({n for n in code.co_names if n in vars(module)}):
                    self._encode_named(f"{name}.{attribute}", vars(module)[attribute])
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._globals(constant, around)

    def _method(self, x: types.MethodType) -> None:
        self._encode_named("function", x.__func__)
        self._encode_named("self", x.__self__)

    def _builtin(self, x: types.BuiltinFunctionType) -> None:
        self._write("builtin", f"{x.__module__}.{x.__qualname__}".encode())
        self._encode_named("self", x.__self__ if not isinstance(x.__self__, types.ModuleType) else x.__self__.__name__)

    def _c_function(self, x: Any) -> None:
        self._write("c function", f"{type(x).__name__} {getattr(x, '__module__', '')} {x.__name__}".encode())

    def _partial(self, x: functools.partial[Any]) -> None:
        self._encode_named("partial", (x.func, x.args, x.keywords))

    def _property(self, x: property) -> None:
        self._encode_named("property", (x.fget, x.fset, x.fdel))

    def _wrapped(self, x: Any) -> None:
        self._encode_named(type(x).__name__, x.__func__ if isinstance(x, staticmethod | classmethod) else x.func)

    def _lru_cache(self, x: Any) -> None:
        self._encode_named("cached", x.__wrapped__)

    def _class(self, kind: type) -> None:
        """Encode a class by name, a user-defined one also by its methods."""
        self._write("class", f"{kind.__module__}.{kind.__qualname__}".encode())
        if kind.__module__ == "builtins":
            return
        if version := _library_version(kind.__module__):
            self._write("version", version.encode())
            return
        if id(kind) in self.met:
            return
        self._assign_number(kind)
        self._class(type(kind))
        for base in kind.__bases__:
            self._class(base)
        for name, value in vars(kind).items():
            if name not in _OF_CLASSES and not isinstance(value, _DESCRIPTORS):
                self._encode_named(f"{kind.__qualname__}.{name}", value)

    def _module(self, x: types.ModuleType) -> None:
        self._write("module", x.__name__.encode())
        if version := _library_version(x.__name__):
            self._write("version", version.encode())
        elif path := getattr(x, "__file__", None):
            try:
                self._write("source", hashlib.sha256(Path(path).read_bytes()).digest())
            except OSError as fault:
                raise _NoKeyError(x, f"its file can't be read: {fault.strerror}") from None

    # ------------------------------------------------------------ programs

    def _operation_record(self, x: OpDef) -> None:
        self._write("operation record", x.name.encode())

    def _graph(self, graph: Graph) -> None:
        """Encode operations in graph order; operands are encoded as numbers, so that long chains need no recursion."""
        self._assign_number(graph)
        for op in graph.operations:
            self._assign_number(op)
        if graph.loop_body is not None:
            self._encode_named("around", graph.loop_body.parent)
        self._write("operations", str(len(graph.operations)).encode())
        for op in graph.operations:
            self.path.append(f"operation '{op.name}'")
            self._write("operation", f"{op.opdef.name}\0{op.name}\0{op.region}".encode())
            self._write("flags", f"{op in graph.inner} {op in graph.again}".encode())
            for x in op.inputs:
                self._tensor(x)
            for y in op.outputs:
                self._write("output", f"{y.name}\0{y.dtype.name}".encode())
                self.add(y.shape)
            self._encode_named("owner", op.owner)
            for name, value in op.attrs.items():
                self._encode_named(name, value)
            self.path.pop()
        for name in _GRAPH_TABLES:
            self._encode_named(name, getattr(graph, name))
        self._encode_named("scope", graph.scope)
        if graph.loop_body is not None:
            for field_ in fields(graph.loop_body):
                if field_.name != "parent":
                    self._encode_named(field_.name, getattr(graph.loop_body, field_.name))

    def _operation(self, op: Operation) -> None:
        """Encode an operation reached before its graph: encode the graph first, then its number."""
        self.add(op.graph)
        if id(op) not in self.met:
            raise _NoKeyError(op, "its graph does not contain it")
        self.add(op)

    def _tensor(self, x: Tensor) -> None:
        self._write("tensor", str(x.operation.outputs.index(x)).encode())
        self.add(x.operation)


def _outside_names(code: types.CodeType) -> tuple[set[tuple[str, ...]], set[str]]:
    """The globals that code refers to, each as a path of attributes such as ("np", "random"), and the modules it
    imports."""
    taken: set[tuple[str, ...]] = set()
    imported: set[str] = set()
    path: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("CACHE", "EXTENDED_ARG"):
            continue
        if path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, step.argval)
            continue
        taken.add(path)
        path = (step.argval,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
        if step.opname == "IMPORT_NAME":
            imported.add(step.argval)
    return taken - {()}, imported - {""}


@functools.cache
def _library_version(module: str | None) -> str | None:
    """The version of the library that defines a module, with a digest of the module; None for user modules."""
    name = module or ""
    top = name.partition(".")[0]
    if top in OWN:
        return library_key()
    if top in sys.stdlib_module_names:
        return sys.version
    path = str(getattr(sys.modules.get(name), "__file__", None) or "")
    if not any(folder in Path(path).parts for folder in ("site-packages", "dist-packages")):
        return None
    try:
        number = metadata.version(top)
    except metadata.PackageNotFoundError:
        number = str(getattr(sys.modules.get(top), "__version__", ""))
    return f"{top} {number} {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]}"


def _bits(x: float) -> bytes:
    return struct.pack("<d", x)


_PLAIN: dict[type, Callable[[Any], tuple[str, bytes]]] = {
    type(None): lambda x: ("none", b""),
    type(...): lambda x: ("ellipsis", b""),
    type(NotImplemented): lambda x: ("not implemented", b""),
    bool: lambda x: ("bool", b"1" if x else b"0"),
    int: lambda x: ("int", hex(x).encode()),
    float: lambda x: ("float", _bits(x)),
    complex: lambda x: ("complex", _bits(x.real) + _bits(x.imag)),
    str: lambda x: ("text", x.encode(errors="surrogatepass")),
    bytes: lambda x: ("bytes", x),
}
_OF_CLASSES = (
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__firstlineno__",
    "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__",
    "__abstractmethods__", "_abc_impl", "__parameters__", "__orig_bases__",
)  # fmt: skip
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_C_FUNCTIONS = (
    types.WrapperDescriptorType, types.MethodWrapperType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    np.ufunc,
)  # fmt: skip
# The first matching type decides; dataclasses and picklable objects follow.
_OBJECTS: tuple[tuple[Any, Callable[[_Encoder, Any], None]], ...] = (
    (Graph, _Encoder._graph),
    (Operation, _Encoder._operation),
    (Tensor, _Encoder._tensor),
    (OpDef, _Encoder._operation_record),
    (Frozen, _Encoder._frozen),
    (enum.Enum, _Encoder._enum),
    (type, _Encoder._class),
    (types.ModuleType, _Encoder._module),
    (types.FunctionType, _Encoder._function),
    (types.MethodType, _Encoder._method),
    (types.BuiltinFunctionType, _Encoder._builtin),
    (_C_FUNCTIONS, _Encoder._c_function),
    (functools.partial, _Encoder._partial),
    (functools._lru_cache_wrapper, _Encoder._lru_cache),
    ((staticmethod, classmethod, functools.cached_property), _Encoder._wrapped),
    (property, _Encoder._property),
    ((operator.attrgetter, operator.itemgetter, operator.methodcaller), _Encoder._pickled_state),
    (np.ndarray, _Encoder._array),
    (np.generic, _Encoder._scalar),
    ((set, frozenset), _Encoder._set),
    ((dict, OrderedDict, types.MappingProxyType), _Encoder._mapping),
    ((list, tuple, deque, bytearray), _Encoder._sequence),
)
