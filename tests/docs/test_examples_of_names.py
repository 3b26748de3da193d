"""Public functions and classes have docstrings with an example, which runs as a doctest."""

from __future__ import annotations

import ast
import builtins
import doctest
import inspect
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

import hardware
import layouts
import meshlib as mtf

ROOMS = [mtf, hardware, layouts, *(module for name in mtf.__all__ if inspect.ismodule(module := getattr(mtf, name)))]


def public(module: ModuleType) -> dict[str, Callable[..., object]]:
    """The public functions and classes of a module that are this library's."""
    names = getattr(module, "__all__", None) or {*vars(module), *getattr(module, "NAMES", ())}
    if module is mtf.jax:
        pytest.importorskip("jax")
    values = {name: getattr(module, name) for name in names if not name.startswith("_")}
    own = ("meshlib", "hardware", "layouts")
    return {name: v for name, v in values.items() if callable(v) and v.__module__.partition(".")[0] in own}


@pytest.mark.parametrize("module", ROOMS, ids=lambda module: module.__name__)
def test_functions_have_a_docstring_with_an_example(module: ModuleType) -> None:
    docs = {name: inspect.getdoc(f) or "" for name, f in public(module).items() if not inspect.isclass(f)}
    assert {name for name, doc in docs.items() if ">>>" not in doc} == set()


@pytest.mark.parametrize("module", ROOMS, ids=lambda module: module.__name__)
def test_classes_have_a_docstring_with_an_example(module: ModuleType) -> None:
    docs = {name: c.__doc__ or "" for name, c in public(module).items() if inspect.isclass(c)}
    assert {name for name, doc in docs.items() if ">>>" not in doc} == set()


def unbound_names(doc: str) -> set[str]:
    """The names that the example of a docstring uses and does not bind, so that a reader can't paste it."""
    examples = doctest.DocTestParser().get_examples(doc)
    nodes = [*ast.walk(ast.parse("\n".join(example.source for example in examples)))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name or "" for node in nodes if isinstance(node, ast.ExceptHandler | ast.FunctionDef | ast.ClassDef)}
    bound |= {name.asname or name.name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)
              for name in node.names}  # fmt: skip
    return {node.id for node in names} - bound - {*dir(builtins)}


@pytest.mark.parametrize("module", ROOMS, ids=lambda module: module.__name__)
def test_examples_can_be_pasted(module: ModuleType) -> None:
    docs = {}
    for name, value in public(module).items():
        docs[name] = inspect.getdoc(value) or ""
        if inspect.isclass(value):
            members = {n: m for n, m in vars(value).items() if not n.startswith("_")}
            docs |= {
                f"{name}.{n}": doc for n, m in members.items() if isinstance(doc := getattr(m, "__doc__", None), str)
            }
    assert {name: names for name, doc in docs.items() if (names := unbound_names(doc))} == {}


def test_a_name_that_an_example_does_not_bind_is_noticed() -> None:
    assert unbound_names(">>> import numpy as np\n>>> [x for x in np.array(sizes)]") == {"sizes"}


def missing_names(source: str) -> list[str]:
    """The names `mtf.x.y` in the strings of a module that do not exist, without those whose rest is filled in."""
    tree = ast.parse(source)
    pieces = [node.values for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    begun = {a for values in pieces for a, b in pairwise(values) if not isinstance(b, ast.Constant)}
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in re.finditer(r"\bmtf((?:\.\w+)+)(?![\w{])", node.value):
                value: object = mtf
                for part in [] if node in begun and name.end() == len(node.value) else name[1][1:].split("."):
                    value = getattr(value, part, None)
                missing += [name[0]] * (value is None)
    return missing


@pytest.mark.parametrize("package", ["meshlib", "layouts", "hardware"])
def test_messages_and_docstrings_name_what_exists(package: str) -> None:
    pytest.importorskip("jax")
    files = Path(mtf.__file__).parent.parent.joinpath(package).rglob("*.py")
    assert {(file.name, name) for file in files for name in missing_names(file.read_text())} == set()


def test_a_missing_name_is_noticed() -> None:
    assert missing_names('f"{at}: use mtf.reduce_prod(x), mtf.layers.dense or mtf.layers.{name}"') == [
        "mtf.reduce_prod"
    ]


@pytest.mark.parametrize("module", ROOMS, ids=lambda module: module.__name__)
def test_a_terminal_completes_no_names_that_a_module_only_imports(module: ModuleType) -> None:
    own = ("meshlib", "hardware", "layouts")
    shown = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    homes = {name: getattr(value, "__module__", None) for name, value in shown.items() if callable(value)}
    assert {name for name, home in homes.items() if home and home.partition(".")[0] not in own} <= {"Initializer"}


def seen_by_type_checkers(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Statements without those that run only where `TYPE_CHECKING`, by that name, is false."""
    seen: list[ast.stmt] = []
    for node in statements:
        if isinstance(node, ast.If):
            test = re.sub(r"\w+\.", "", ast.unparse(node.test))
            seen += seen_by_type_checkers([] if test == "not TYPE_CHECKING" else node.body)
            seen += seen_by_type_checkers([] if test == "TYPE_CHECKING" else node.orelse)
        else:
            seen.append(node)
    return seen


def test_type_checkers_see_unknown_names() -> None:
    """A module's `__getattr__` makes every name known to them, such as mtf.relluu."""
    root = Path(mtf.__file__).parents[1]
    files = [file for package in ("meshlib", "layouts", "hardware") for file in (root / package).rglob("__init__.py")]
    seen = {file: ast.Module(seen_by_type_checkers(ast.parse(file.read_text()).body), []) for file in files}
    assert any("__getattr__" in file.read_text() for file in files)
    assert [str(file) for file, tree in seen.items() if "__getattr__" in ast.unparse(tree)] == []
