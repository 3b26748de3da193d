"""Packages whose public names are imported on first use.

A package lists its public names once, where type checkers and readers expect them:

    if TYPE_CHECKING:
        from meshlib.core.graph import Graph as Graph
        ...

`lazy_names` reads that list from the package's source and returns the module functions `__getattr__` and `__dir__`
(PEP 562), so that `import meshlib` loads none of them and a program pays only for the modules that it uses.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any, NamedTuple

from meshlib.core.errors import nearest


class Export(NamedTuple):
    """Definition of a public name: an attribute of `module`, or a submodule of it."""

    module: str
    attribute: str


def exports(source: str) -> dict[str, Export]:
    """The names that a package's source imports as `x as x` under `if TYPE_CHECKING`, in file order.

    Example:
      >>> exports("if TYPE_CHECKING:\\n    from a.b import c as c\\n    from a import b as b")
      {'c': Export(module='a.b', attribute='c'), 'b': Export(module='a', attribute='b')}
    """
    blocks = [node.body for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for body in blocks for node in body if isinstance(node, ast.ImportFrom)]
    return {a.asname or a.name: Export(node.module or "", a.name) for node in imports for a in node.names}


def lazy_names(
    package: str,
    exported: Callable[[Any], Any] = lambda value: value,
    foreign: Callable[[str, Collection[str]], str] = lambda name, public: "",
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are imported on first use.

    Args:
      package: its `__name__`.
      exported: maps a value to its public form, such as a wrapper of a function.
      foreign: (name, the package's names) -> what to do in place of a name of another library, or "".
    Returns: functions to bind as `__getattr__` and `__dir__` in the package; `__getattr__` also provides `__all__`.
    """
    names: dict[str, Export] = {}

    def table() -> dict[str, Export]:
        if not names:
            names.update(exports(_source(package)))
        return names

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return list(table())
        if name == "__version__":
            return import_module("meshlib.core.version").VERSION
        if name.startswith("_"):
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        export = table().get(name)
        if export is None:
            remedy = foreign(name, table())
            hint = f"; {remedy}" if remedy else nearest(name, table())
            raise AttributeError(f"module '{package}' has no attribute '{name}'{hint}")
        parent = import_module(export.module) if export.module != package else sys.modules[package]
        if export.module != package and hasattr(parent, export.attribute):
            value = getattr(parent, export.attribute)
        else:
            value = import_module(f"{export.module}.{export.attribute}")
        value = exported(value)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *table()})

    return __getattr__, __dir__


def _source(package: str) -> str:
    loader = getattr(sys.modules[package].__spec__, "loader", None)
    get_source = getattr(loader, "get_source", None)
    source = get_source(package) if get_source is not None else None
    if source is None:
        raise ImportError(f"{package} was installed without its source, which lists its public names")
    return str(source)
