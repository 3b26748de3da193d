"""The house: imports point down only, and a stray module on the path is named."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import hardware
import layouts
import meshlib
from tests.core.public import public_names
from tests.effort import each
from tests.paths import ROOT

OWN = ("meshlib", "layouts", "hardware")
BELOW = {"meshlib": {"layouts", "hardware"}, "layouts": set(), "hardware": set()}
REQUIRED = {"numpy", "ml_dtypes", "einops"}
# Packages of extras, and what may import them at once: modules that nothing outside their package imports. Its
# `__init__` names them and imports them when a name is asked for.
OPTIONAL = {"jax": "meshlib/jax/"}
# The floors inside meshlib, the highest first, by the first part of a module's name. A module imports from lower lines
# and from its own package; operations and gradients are written in one another.
HOUSE = """
__main__
meshlib
command
report sharing
validation
generation jax searching testing training
estimation models storage verification
lowering simulation
layers optimize program
data ops
records
core
"""
FLOORS = {unit: (n, p) for n, line in enumerate(HOUSE.split("\n")) for p in line.split() for unit in p.split("+")}
# What points up all the same: (module, what it imports) -> why. Each is bound when it runs, or for its type alone.
UP = {
    ("meshlib.core.graph", "meshlib.ops.control.sources"): "a loop's stand-in for an outer value is an input",
    ("meshlib.core.shown", "meshlib.report.cells"): "_repr_html_ of all that notebooks show",
    ("meshlib.estimation.result", "meshlib.report.page"): "Estimate.report",
    ("meshlib.estimation.result", "meshlib.report.plots"): "Estimate.plot",
    ("meshlib.estimation.memory.device_memory", "meshlib.report.plots"): "DeviceMemory.plot",
    ("meshlib.estimation.views.profile", "meshlib.report.plots"): "Profile.plot",
    ("meshlib.estimation.views.scaling", "meshlib.report.plots"): "Scaling.plot",
    ("meshlib.program.analysis.memory", "meshlib.report.plots"): "Memory.plot",
    ("meshlib.program.instructions", "meshlib.report.plots"): "Value.plot",
    ("meshlib.layers.pipeline_task_schedule", "meshlib.report.plots"): "TaskSchedule.plot",
    ("meshlib.searching.result", "meshlib.report.plots"): "Found.plot",
    ("meshlib.program.records", "meshlib.report.page"): "Program.report",
    ("meshlib.searching.result", "meshlib.report.page"): "Found.report",
    ("meshlib.searching.result", "meshlib.report.alternatives"): "Found.report",
}
# Methods of the public face that are written in a module of their own, which builds on the class: bound when called.
METHODS = {
    ("meshlib.__main__", "meshlib.command"): "ctrl-C is quiet while modules load",
    ("meshlib", "meshlib.core.foreign_names"): "the same",
    ("meshlib", "meshlib.core.lazy_imports"): "the same",
    ("meshlib", "meshlib.core.public_calls"): "the same",
    ("meshlib.program.records", "meshlib.program.analysis.buffers"): "Program.buffers",
    ("meshlib.program.instructions", "meshlib.program.analysis.buffers"): "Loop.buffers",
    ("meshlib.program.records", "meshlib.program.analysis.memory"): "Program.memory",
    ("meshlib.program.records", "meshlib.program.analysis.work"): "Program.work",
    ("meshlib.program.records", "meshlib.program.views.listing"): "str(program)",
    ("meshlib.estimation.result", "meshlib.estimation.views.trace"): "Estimate.save_trace",
    ("meshlib.estimation.result", "meshlib.estimation.views.films"): "Estimate.film",
    ("meshlib.models.config", "meshlib.models.counts"): "TransformerConfig.parameters, .flops_per_token",
    ("meshlib.validation.validating", "meshlib.validation.report"): "str(validation)",
    ("meshlib.validation.talks", "meshlib.validation.talks_report"): "str(talks)",
}
FILES = [path for floor in OWN for path in sorted((ROOT / floor).rglob("*.py"))]


@cache
def imports(path: Path) -> tuple[tuple[ast.Import | ast.ImportFrom, str], ...]:
    """The import statements of a file, each with when it runs: "at once", "called", or under TYPE_CHECKING "types"."""
    waiting: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text()), "at once")]
    found = []
    while waiting:
        node, when = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append((node, when))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when = "called"
        elif (
            isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id.strip("_") == "TYPE_CHECKING"
        ):
            waiting += [(n, when) for n in node.orelse]
            waiting += [(n, "types" if when == "at once" else when) for n in node.body]
            continue
        if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):  # expressions hold none
            waiting += [(n, when) for n in ast.iter_child_nodes(node)]
    return tuple(found)


def packages(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The top-level packages of an import statement."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    assert not node.level, f"line {node.lineno}: imports are absolute, so that floors can be read off them"
    return [(node.module or "").partition(".")[0]]


def test_the_floors_are_there():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(OWN)
    assert len(FILES) > 40


@each("path", FILES)
def test_imports_point_down(path):
    floor = path.relative_to(ROOT).parts[0]
    here = path.relative_to(ROOT).as_posix()
    allowed = {name for name, folder in OPTIONAL.items() if here.startswith(folder) and here != f"{folder}__init__.py"}
    fine = {*sys.stdlib_module_names, *REQUIRED, *OWN, *allowed}
    for node, when in imports(path):
        for name in packages(node):
            at = f"{path}:{node.lineno}"
            assert name not in OWN or name in (floor, *BELOW[floor]), f"{at}: {floor} must not know {name}"
            assert when != "at once" or name in fine, (
                f"{at}: {name} is not a requirement of the core; import it where it is used"
            )


@pytest.mark.parametrize("folder", OPTIONAL.values())
def test_nobody_outside_imports_what_needs_an_extra(folder):
    package = folder.strip("/").replace("/", ".")
    for module in MODULES:
        if module == package or not module.startswith(package):
            at_once = [name for name, _, when in own_imports(module) if when == "at once"]
            assert not [name for name in at_once if name.startswith(f"{package}.")], module


# ---------------------------------------------------------------- floors inside meshlib


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@cache
def own_imports(module: str) -> tuple[tuple[str, int, str], ...]:
    """The modules of meshlib that one imports, each with its line and when: "at once", "called", or for "types"."""
    found = []
    for node, when in imports(MODULES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            # `from package import x` is the module x where there is one, else it is the package's.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in inside]
        for name in names:
            if name.partition(".")[0] == "meshlib":
                found.append((name, node.lineno, when))
    return tuple(found)


def unit(module: str) -> str:
    """`meshlib.ops.control.loops` -> `ops`; the package itself is the public face."""
    return module.split(".")[1] if "." in module else module


def points_up(module: str, name: str) -> bool:
    """Whether an import goes to a higher floor, or to a neighbour on the same."""
    (own, package), (other, other_package) = FLOORS[unit(module)], FLOORS[unit(name)]
    return package != other_package and other <= own


INSIDE = [name for name in MODULES if name.partition(".")[0] == "meshlib"]


def test_every_module_has_its_floor():
    assert {unit(m) for m in INSIDE} == set(FLOORS)


@each("module", INSIDE)
def test_imports_inside_meshlib_point_down(module):
    for name, line, when in own_imports(module):
        where = f"{MODULES[module]}:{line}: {module} imports {name}"
        if points_up(module, name):
            assert when != "at once", f"{where}, which lies on a higher floor or beside it"
            assert (module, name) in UP, f"{where}, which lies on a higher floor or beside it, if only for {when}"
        # In ops, rules of gradients; in command, what one command alone needs: the others start sooner without it.
        elif when == "called" and not unit(module) == unit(name) == "ops" and unit(module) != "command":
            assert (module, name) in UP | METHODS, f"{where} in a function; import it at the top of the file"


def test_every_exception_is_needed():
    made = {(module, name) for module in INSIDE for name, _, when in own_imports(module) if when != "at once"}
    assert (UP | METHODS).keys() <= made


def test_the_inner_floors_are_seen():
    assert points_up("meshlib.program.records", "meshlib.lowering")
    assert points_up("meshlib.simulation.fast", "meshlib.estimation.work.plan")
    assert points_up("meshlib.layers.norms", "meshlib")
    assert not points_up("meshlib.ops.control.loop_gradient", "meshlib.ops.gradients")
    assert not points_up("meshlib.ops.gradients", "meshlib.ops.pointwise.elementwise")
    assert not points_up("meshlib.simulation.fast", "meshlib.simulation.buffers")
    assert not points_up("meshlib", "meshlib.testing")
    assert {(name, when) for name, _, when in own_imports("meshlib.core.graph")} >= {
        ("meshlib.ops.control.sources", "called"), ("meshlib.core.opdef", "types"),
        ("meshlib.core.source_lines", "at once"),
    }  # fmt: skip


@pytest.mark.parametrize("package", OWN)
def test_no_module_is_shadowed_by_a_name_of_its_package(package):
    """`import meshlib.lowering.problem` gives the module, whatever the packages export."""
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, f"{package}."):
        if any(found.name.startswith(folder.replace("/", ".")) for folder in OPTIONAL.values()):
            continue  # may need what is not installed
        parent, _, name = found.name.rpartition(".")
        module = importlib.import_module(found.name)
        assert getattr(sys.modules[parent], name) is module, (
            f"{found.name} is hidden by {getattr(sys.modules[parent], name)}"
        )


def test_the_walk_sees_what_it_should(tmp_path):
    file = tmp_path / "some.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import jax\nelse:\n    import einops\n"
        "try:\n    import numpy\nexcept ImportError:\n    import scipy\n"
        "class A:\n    import json\n    def f(self):\n        import matplotlib\n"
    )
    seen = {name: when for node, when in imports(file) for name in packages(node)}
    assert {name for name, when in seen.items() if when == "at once"} == {"typing", "einops", "numpy", "scipy", "json"}
    assert seen["matplotlib"] == "called"
    assert seen["jax"] == "types"


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n{code}"],
        cwd=path[0],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("package", ["hardware", "layouts"])
@pytest.mark.parametrize("kind", ["module", "package"])
def test_a_shadowing_module_is_named(tmp_path, package, kind):
    stray = tmp_path / f"{package}.py" if kind == "module" else tmp_path / package / "__init__.py"
    stray.parent.mkdir(exist_ok=True)
    stray.write_text("x = 1\n")
    done = run("import meshlib", tmp_path, ROOT)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: meshlib needs its own package"), done.stderr
    assert f"'{package}'" in last
    assert str(stray.resolve()) in last
    assert "rename that file or take its folder off the path" in last


def test_the_lower_floors_stand_alone(tmp_path):
    code = "import hardware.slices, layouts, sys\nprint(sorted(set(sys.modules) & {'meshlib', 'jax', 'matplotlib'}))"
    done = run(code, tmp_path, ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_importing_meshlib_brings_nothing_heavy(tmp_path):
    heavy = ("jax", "torch", "tensorflow", "matplotlib", "scipy", "pandas")
    done = run(f"import meshlib, sys\nprint([m for m in {heavy} if m in sys.modules])", tmp_path, ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_importing_meshlib_loads_only_its_table_of_names(tmp_path):
    code = "import meshlib, sys\nprint(sum(m.split('.')[0] in ('meshlib', 'layouts', 'hardware') for m in sys.modules))"
    done = run(code, tmp_path, ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 26


def test_without_jax_its_tests_are_skipped_not_broken(tmp_path):
    folders = [str(ROOT / "tests" / "jax")]
    arguments = ["--collect-only", "-q", "--assert=plain", *folders]
    code = f"import sys; sys.modules['jax'] = None\nimport pytest\npytest.main({arguments})"
    done = run(code, tmp_path, ROOT)
    assert "error" not in (done.stdout + done.stderr).lower(), done.stdout


@pytest.mark.parametrize("package", [meshlib, meshlib.layers, meshlib.models, meshlib.optimize, layouts, hardware])
def test_public_names_are_listed_once_and_there(package):
    names = public_names(package)
    assert len(names) > 8
    assert all(hasattr(package, name) for name in names)


def exists(module: str, name: str) -> bool:
    """True if a module has a name, or a module of that name."""
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def missing_imports(source: str) -> list[str]:
    """The names that a script imports from this library, and that do not exist."""
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ImportFrom) and n.module]
    own = [(n.module, a.name) for n in nodes if n.module.partition(".")[0] in OWN for a in n.names]
    return [f"{module}.{name}" for module, name in own if not exists(module, name)]


def test_scripts_import_what_exists():
    pytest.importorskip("jax")
    scripts = [*(ROOT / "tests" / "benchmarks").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert {file.name: names for file in scripts if (names := missing_imports(file.read_text()))} == {}
    assert missing_imports("from hardware.collectives import exchange_paths, snakes") == ["hardware.collectives.snakes"]
