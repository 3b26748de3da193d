"""Source lines: the user's whatever lies in between, the forward's in gradients, and what a front end gives."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core import source_lines
from meshlib.core.graph import Operation, absolute_scope
from meshlib.core.source_lines import source_line, written_at
from meshlib.verification.candidates import all_gradients
from tests.paths import ROOT

D, E = mtf.Dimension("d", 4), mtf.Dimension("e", 6)


def here(above: int = 0) -> str:
    """The line of the call, or one above."""
    return f"test_source_lines.py:{sys._getframe(1).f_lineno - above}"


def by_region(graph: mtf.Graph, region: str) -> list[Operation]:
    return [op for op in graph.operations if op.region == region]


def listed(program: mtf.Program) -> dict[str, set[str]]:
    """The lines of each name in the listing, bodies of loops included."""
    found: dict[str, set[str]] = {}
    for name, line in re.findall(r"^ *%\d+ +(\S+): .*\((\S+)\)$", str(program), re.M):
        found.setdefault(name, set()).add(line)
    return found


# ---------------------------------------------------------------- gradients


def test_backward_rows_name_the_forward_line_they_belong_to():
    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        w = mtf.variable("w", [D, E])
        declared = here(1)
        h = mtf.einsum([x, w], output_shape=[E])
        product = here(1)
        y = mtf.tanh(h)
        bend = here(1)
        loss = mtf.reduce_sum(y * y)
        total = here(1)
        train = mtf.optimize.SgdOptimizer(0.1).minimize(loss)
        minimize = here(1)
    lines = {op.name: op.source for op in by_region(graph, "backward")}
    assert {source for name, source in lines.items() if name.startswith("einsum/grad")} == {product}
    assert {source for name, source in lines.items() if name.startswith("tanh/grad")} == {bend}
    assert lines["ones"] == total
    assert lines["multiply/grad/multiply"] == total
    assert {source for name, source in lines.items() if name.startswith("w/grad")} <= {declared}
    assert set(lines.values()) <= {declared, product, bend, total}
    assert {op.source for op in by_region(graph, "update")} == {minimize}
    program = mtf.lower({"loss": loss}, train, mesh="a:2", layout="d:a")
    assert {c.source for c in program.collectives} == {product}


def test_the_gradient_of_a_shared_value_names_where_it_was_made():
    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        shared = mtf.sin(x)
        made = here(1)
        mtf.gradients([mtf.exp(shared), mtf.tanh(shared)], [x])
    sums = [op for op in by_region(graph, "backward") if op.opdef.name == "add_n"]
    assert [op.source for op in sums] == [made]


@pytest.mark.parametrize("remat", ["full", "none", "matmuls"])
def test_rows_of_a_loops_gradient_name_the_line_in_the_body(remat: str):
    lines = {}

    def body(carries: Any, slices: Any) -> Any:
        h = mtf.tanh(carries[0])
        lines["tanh"] = here(1)
        y = mtf.multiply(h, slices[0], name="scaled")
        lines["scaled"] = here(1)
        return [y], []

    with mtf.Graph() as graph:
        x = mtf.input("x", [D, E])
        (last,), _ = mtf.scan(body, [mtf.reduce_sum(x, output_shape=[E])], [x], D, remat=remat)
        lines["scan"] = here(1)
        loss = mtf.reduce_sum(last)
        lines["loss"] = here(1)
        (dx,) = mtf.gradients([loss], [x])
    assert dx is not None
    found = listed(mtf.lower([loss, dx]))
    for kind in ("tanh", "scaled"):
        rows = [lines_of for name, lines_of in found.items() if f"/{kind}/grad" in name or name.endswith(f"/{kind}")]
        assert len(rows) > 1
        assert set.union(*rows) == {lines[kind]}
    (backwards,) = [op for op in by_region(graph, "backward") if op.opdef.name == "scan"]
    assert backwards.source == lines["scan"]


def test_what_is_computed_again_names_its_own_line():
    lines = {}

    def function(v: mtf.Tensor) -> mtf.Tensor:
        inner = mtf.sin(v, name="inner")
        lines["inner"] = here(1)
        return mtf.exp(inner)

    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        mtf.gradients([mtf.recompute_grad(function, [x])], [x])
    again = [op for op in by_region(graph, "backward") if op.name == "inner"]
    assert [op.source for op in again] == [lines["inner"]]


def test_a_rule_of_the_users_names_its_own_lines():
    lines = {}

    def rule(inputs: Any, results: Any, cotangents: Any) -> Any:
        doubled = mtf.multiply(cotangents[0], 2.0, name="doubled")
        lines["doubled"] = here(1)
        return [doubled]

    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        y = mtf.custom_gradient(lambda v: mtf.exp(v), rule, [x])
        mtf.gradients([y], [x])
    (found,) = [op for op in graph.operations if op.name.endswith("doubled")]
    assert found.source == lines["doubled"]


def test_a_rule_of_the_librarys_names_the_forward_line():
    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        y = mtf.custom_gradient(mtf.exp, lambda xs, ys, dys: _own_rule(dys[0]), [x])
        forward = here(1)
        with written_at("other.py:1"):
            mtf.gradients([y], [x])
    assert [op.source for op in graph.operations if op.name.endswith("negative")] == [forward]


# A function of this package, as far as frames tell.
_own_rule: Callable[[mtf.Tensor], list[mtf.Tensor]] = eval(
    compile(
        "lambda dy: [mtf.negative(dy)]", str(Path(source_lines.__file__).parents[1] / "layers" / "rule.py"), "eval"
    ),
    {"mtf": mtf},
)


def test_gradients_that_verify_writes_name_no_line_of_the_library():
    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        y = mtf.tanh(mtf.sin(x))
        line = here(1)
    with_gradients = all_gradients(graph, {"y": y}, [])
    before = f"test_source_lines.py:{int(line.rpartition(':')[2]) - 1}"
    assert {t.operation.source for t in with_gradients.values()} <= {line, before}


# ---------------------------------------------------------------- models of the library


@pytest.fixture(scope="module")
def preset() -> tuple[str, mtf.Program]:
    """The line that wrote a step of a preset, and the step."""
    config, mesh = mtf.models.preset("llama2-7b").reduced(), "data:2;tensor:2"
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(config, 8, 16, remat="matmuls")
        line = here(1)
    return line, mtf.lower(outputs, updates, mesh=mesh, layout=mtf.models.layout("2d", config, mesh))


def test_rows_of_a_model_of_the_library_name_the_call_and_differ_by_name(
    preset: tuple[str, mtf.Program], tmp_path: Path
):
    line, program = preset
    moved = program.collectives
    assert {c.source for c in moved} == {line}
    assert len({(c.tensor, c.kind, c.phase) for c in moved}) == len(moved)
    rows = mtf.estimate(program, "v5e-4").rows
    assert {r.source for r in rows} == {line}
    assert max(Counter((r.name, r.kind, r.phase) for r in rows).values()) == 1
    assert {live.source for live in program.memory.live} <= {line, program.memory.at}


def test_listings_show_the_scoped_name_with_the_line(preset: tuple[str, mtf.Program]):
    line, program = preset
    shown = next(text for text in str(program).splitlines() if " layers/scan/attention/q: " in text)
    assert shown.endswith(f"({line})")
    assert "einsum 'layers/scan/attention/out' sums over 'heads'" in mtf.collectives_table(program.collectives)


# ---------------------------------------------------------------- frames


def test_contextlib_and_functools_are_in_between():
    @functools.singledispatch
    def combine(x: object) -> mtf.Tensor:
        raise NotImplementedError

    combine.register(mtf.Tensor, mtf.negative)
    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        assert combine(x).operation.source == here()
        assert functools.partial(mtf.tanh, name="t")(x).operation.source == here()
        assert functools.reduce(mtf.add, [x, x, x]).operation.source == here()
        with contextlib.ExitStack() as stack:
            stack.callback(mtf.tanh, x)
    assert graph.operations[-1].source == here(2)


def test_numpys_callbacks_are_in_between():
    with mtf.Graph():
        x = mtf.input("x", [D])
        lambdas = np.vectorize(lambda factor: x * float(factor), otypes=[object])
        line = here(1)
        assert {y.operation.source for y in lambdas([1.0, 2.0])} == {line}
        direct = np.vectorize(functools.partial(mtf.multiply, x), otypes=[object])([1.5])
        assert direct[0].operation.source == here(1)


@dataclass
class Block:
    """A dataclass of the user's, whose __init__ is text that dataclasses made."""

    x: mtf.Tensor
    made: mtf.Tensor = field(default_factory=functools.partial(mtf.ones, [D]))

    def __post_init__(self) -> None:
        self.y = mtf.tanh(self.x)


def test_the_init_of_a_dataclass_is_in_between():
    with mtf.Graph():
        block = Block(mtf.input("x", [D]))
        line = here(1)
    assert block.made.operation.source == line
    assert block.y.operation.source.startswith("test_source_lines.py:")
    assert block.y.operation.source != line


def test_a_rule_of_a_subclass_is_the_users():
    lines = []

    class Halving(mtf.optimize.Optimizer):
        """Halves the variable."""

        def rule(self, u: mtf.optimize.Update) -> mtf.Tensor:
            new = u.value * 0.5
            lines.append(here(1))
            return new

    with mtf.Graph():
        w = mtf.variable("w", [D])
        (update,) = Halving(0.1).minimize(mtf.reduce_sum(w))
        minimize = here(1)
    assert update.source == minimize
    assert update.inputs[0].operation.source == lines[0]


def test_threads_run_the_users_code_and_the_librarys():
    with mtf.Graph():
        x = mtf.input("x", [D])
    with ThreadPoolExecutor(1) as pool:
        users = pool.submit(lambda: mtf.tanh(x)).result()
        assert users.operation.source == here(1)
        assert pool.submit(mtf.tanh, x).result().operation.source == "unknown line"


BUILD = (
    "import meshlib as mtf\nwith mtf.Graph():\n    x = mtf.ones([mtf.Dimension('d', 2)])\n    y = (lambda v: -v)(x)\n"
)
PACKAGE = str(Path(source_lines.__file__).parents[1])


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("<string>", "<string>"),
        ("<stdin>", "<stdin>"),
        ("<ipython-input-3-0123abc>", "<ipython-input-3-0123abc>"),
        ("/tmp/ipykernel_17/2871.py", "2871.py"),
        (PACKAGE + "_user/model.py", "model.py"),
        (str(Path(PACKAGE).parent / "model.py"), "model.py"),
        (str(Path(np.__file__).parent.parent / "company" / "model.py"), "model.py"),
        (str(Path(contextlib.__file__).parent / "site-packages" / "company" / "model.py"), "model.py"),
    ],
)
def test_the_users_files_wherever_they_lie(file: str, shown: str):
    space: dict[str, Any] = {}
    exec(compile(BUILD, file, "exec"), space)
    assert (space["x"].operation.source, space["y"].operation.source) == (f"{shown}:3", f"{shown}:4")


@pytest.mark.parametrize(
    "file",
    [
        PACKAGE + "/layers/any.py",
        contextlib.__file__,
        str(Path(np.__file__).parent / "lib" / "any.py"),
        "<frozen runpy>",
    ],
)
def test_files_that_are_not_the_users(file: str):
    space: dict[str, Any] = {"source_line": source_line}
    exec(compile("def find():\n    return source_line()", file, "exec"), space)
    assert space["find"]() == here()


def test_from_an_archive(tmp_path: Path):
    """The library in a zip file names the user's lines too."""
    archive = tmp_path / "library.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for package in ("meshlib", "layouts", "hardware"):
            for path in (ROOT / package).rglob("*.py"):
                packed.write(path, path.relative_to(ROOT))
    script = tmp_path / "model.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(archive)!r})\n{BUILD}print(mtf.__file__, y.operation)\n")
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    where, _, op = done.stdout.strip().partition(" ")
    assert where.startswith(str(archive)), done.stderr
    assert op == "negative 'negative' (model.py:6)"


# ---------------------------------------------------------------- positions from outside


def test_a_front_end_gives_position_and_name():
    with mtf.Graph() as graph:
        x = mtf.input("x", [D])
        with written_at("traced.py:7"), absolute_scope("block/attention"):
            y = _helper(x)
        with written_at("traced.py:9"), pytest.raises(mtf.ShapeError, match=r"^einsum \(traced.py:9\)"):
            mtf.einsum([x, y], output_shape=[E])
        mtf.gradients([y], [x])
    assert str(y.operation) == "tanh 'block/attention/tanh' (traced.py:7)"
    assert {op.source for op in by_region(graph, "backward") if "attention" in op.name} == {"traced.py:7"}
    assert source_line() == here()


def _helper(x: mtf.Tensor) -> mtf.Tensor:
    return mtf.tanh(x)


@pytest.mark.parametrize("position", ["", None, 12])
def test_a_position_is_text(position: Any):
    with (
        pytest.raises(mtf.GraphError, match=r"written_at: expected a position such as 'model.py:12', got"),
        written_at(position),
    ):
        pass


def test_cells_of_a_notebook_are_named_by_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"/tmp/ipykernel_1/1622591296.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=known.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    names: dict[str, Any] = {"mtf": mtf}
    code = "\n\nwith mtf.Graph():\n    x = mtf.ones('a:2')"
    exec(compile(code, "/tmp/ipykernel_1/1622591296.py", "exec"), names)
    assert names["x"].operation.source == "In[3]:4"
    exec(compile(code, "/home/user/other.py", "exec"), names)
    assert names["x"].operation.source == "other.py:4"
    shell.compile = None  # another kernel
    assert source_lines.shown_file("/tmp/ipykernel_1/7.py") == "7.py"
