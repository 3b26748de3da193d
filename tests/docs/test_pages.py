"""What the pages promise: blocks run and print what is shown, links work, every room and public name is described."""

from __future__ import annotations

import argparse
import importlib
import itertools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshlib.command.arguments import parser
from tests.core.public import public_names
from tests.core.test_rooms import HOUSE
from tests.docs import modules, pages, picture
from tests.effort import deep

README = pages.read("README.md")
PAGES = pages.pages()
WITH_PYTHON = [page for page in PAGES if any(block.fence.startswith("python") for block in pages.blocks(page))]
WITH_COMMANDS = [page for page in PAGES if any(block.fence == "console" for block in pages.blocks(page))]
DESCRIBED = (
    "meshlib", "meshlib.layers", "meshlib.models", "meshlib.optimize", "meshlib.data", "meshlib.data.samples",
    "meshlib.records", "meshlib.sharing", "meshlib.generation", "meshlib.models.images.detection",
    "layouts", "hardware",
)  # fmt: skip


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if any("jax" in block.text for block in pages.blocks(page) if block.fence.startswith("python")):
        pytest.importorskip("jax", reason="a block needs the extra 'jax'")
    monkeypatch.chdir(tmp_path)  # some write files
    pages.run_python(page, deep())


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_commands_are_understood(page: str) -> None:
    for block, command, shown in pages.commands(page):
        if command[0] == "meshlib":
            try:
                parser().parse_args(command[1:])
            except SystemExit as wrong:
                raise AssertionError(f"{block.where}: {shlex.join(command)}") from wrong
        else:
            check_files_and_flags(block, shlex.join(command))
        if deep():
            assert not pages.differing(shown, pages.run_command(command)), block.where


def check_files_and_flags(block: pages.Block, command: str) -> None:
    """The Python file of a command exists, and knows the flags that it is given."""
    for part in command.split("&&"):
        file = re.search(r"python\S* (?:-m )?((?:tests|examples)[\w./]*)", part)
        if file is None:
            continue
        name = file[1] if file[1].endswith(".py") else file[1].replace(".", "/") + ".py"
        assert (pages.ROOT / name).is_file(), f"{block.where}: there is no {name}"
        source = (pages.ROOT / name).read_text()
        for flag in set(re.findall(r" (--[a-z][\w-]*)", part)) - {"--help"}:
            assert f'"{flag}"' in source, f"{block.where}: {name} has no {flag}"


@pytest.mark.parametrize("page", PAGES)
def test_shell_commands_name_what_exists(page: str) -> None:
    for block in pages.blocks(page):
        if block.fence == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                check_files_and_flags(block, line.partition(" #")[0])


@pytest.mark.parametrize("page", PAGES)
def test_fences_say_how_they_are_tested(page: str) -> None:
    for block in pages.blocks(page):
        assert block.fence in pages.FENCES, f"{block.where}: ```{block.fence}; the fences are in tests/docs/pages.py"


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", pages.read(page), flags=re.S | re.M)
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (pages.ROOT / page).parent / path if path else pages.ROOT / page
        file = file / "README.md" if anchor and file.is_dir() else file
        if not file.exists():
            faults.append(f"{target}: no such file")
        elif anchor and anchor not in map(slug, re.findall(r"^#+ (.*)$", file.read_text(), re.M)):
            faults.append(f"{target}: {file.name} has no such heading")
    # `tests/...`, `meshlib/...` and so on in backticks are paths from the root.
    for path in re.findall(r"`((?:meshlib|layouts|hardware|tests|examples)/[\w./]*)`", text):
        if not (pages.ROOT / path).exists():
            faults.append(f"`{path}`: no such file")
    assert not faults, f"{page}: {faults}"


@pytest.mark.parametrize("room", modules.rooms(), ids=lambda room: room.name)
def test_every_module_is_on_the_page_of_its_room(room: Path) -> None:
    page = (room / "README.md").read_text()
    table = modules.SECTION.search(page)
    assert table is not None, f"{room}: python -m tests.docs.modules adds the table of modules"
    listed = [name for name, _ in re.findall(r"^\| \[([\w/]+)\]\(([\w/.]+)\) \|", table[0], re.M)]
    there = [path.relative_to(room).with_suffix("").as_posix() for path in modules.modules(room)]
    assert listed == there, "write the table again: python -m tests.docs.modules"


def test_every_room_has_a_page() -> None:
    for room in pages.rooms():
        page = room / "README.md"
        assert page.is_file(), f"{room.relative_to(pages.ROOT)} has no README.md"
        assert re.match(r"# .+\n\n[\w`]", page.read_text()), f"{page}: a title, then a sentence that says what this is"


def unmentioned(package: str, texts: Iterable[str]) -> list[str]:
    """The public names of a package that the code of pages has neither alone nor after the package's name.

    A method, a keyword or the end of a file's name, as in `path.csv`, is no mention of a function `csv`.
    """
    code = "\n".join(part for text in texts for part in re.findall(r"```.*?```|`[^`]+`", text, re.S))
    paths = set(re.findall(r"(?<![\w./@-])(?:\w+\.)*\w+(?![\w/-])", code))
    own = {"mtf", package.rpartition(".")[2]}
    mentioned = {path for path in paths if "." not in path} | {
        name for path in paths for owner, name in itertools.pairwise(path.split(".")) if owner in own
    }
    return [name for name in public_names(importlib.import_module(package)) if name not in mentioned]


def test_methods_and_ends_of_file_names_are_no_mention() -> None:
    written = ["`records.write`, `mtf.records.make(x)` and `encode`", "`file.read`, `step.decode()` and `Writer/Fault`"]
    missing = {"read", "decode", "Writer", "Fault"}
    assert missing == set(unmentioned("meshlib.records", written)) & {"write", "make", "encode", *missing}


@pytest.mark.parametrize("package", DESCRIBED)
def test_every_public_name_is_on_a_page(package: str) -> None:
    missing = unmentioned(package, map(pages.read, PAGES))
    assert not missing, f"{package}: no page mentions {missing}"


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    page = pages.read("meshlib/command/README.md")
    (commands,) = [a for a in parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert [name for name in commands.choices if f"`meshlib {name}" not in page] == []


def test_the_readme_is_a_front_page() -> None:
    assert len(README.splitlines()) <= 250
    linked = {(pages.ROOT / target).resolve() for target in re.findall(r"\]\(([\w/.]+\.md)\)", README)}
    assert {pages.ROOT / "CONTRIBUTING.md", pages.ROOT / "meshlib" / "README.md"} <= linked


def test_the_picture_of_the_readme_is_small_and_can_be_drawn_again() -> None:
    for svg in (picture.PICTURE.read_text(), picture.drawn()):
        assert len(svg) < 20_000
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert all(word in svg for word in ("hidden:1024@cols", "core to core", "waits"))


def test_the_picture_of_the_rooms_is_that_of_the_imports() -> None:
    """The block of meshlib/README.md names the rooms in the order of `tests/core/test_rooms.py`."""
    (block,) = [b for b in pages.blocks("meshlib/README.md") if b.text.startswith("examples/")]
    drawn = [re.split(r" {3,}", line.strip())[0].split() for line in block.text.splitlines() if line.startswith("    ")]
    rooms = [line.split() for line in HOUSE.split("\n") if line not in ("", "__main__", "meshlib")]
    assert drawn == rooms, "draw the rooms in meshlib/README.md as HOUSE has them"


def test_exactly_two_setup_commands_of_one_line() -> None:
    commands = [line for line in README.splitlines() if "pip install" in line and line.startswith("python3")]
    assert len(commands) == 2
    assert all(line.startswith("python3 -m venv .venv && ") for line in commands)
    assert commands[0].endswith("examples/mnist.py")
    assert commands[1].endswith("-m pytest -n auto --dist worksteal")


def test_the_harness_sees_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that prints something else, a dead link and a command that is not understood are failures."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    page.write_text("# A\n\n```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:8: \['3'\]"):
        pages.run_python("page.md", deep=False)
    page.write_text("# A\n\n[there](nowhere.md), [here](#b), `tests/none.py`\n\n```console\n$ meshlib fly\n```\n")
    with pytest.raises(AssertionError, match=r"nowhere.md: no such file.*no such heading.*tests/none.py"):
        test_links_lead_somewhere("page.md")
    pages.blocks.cache_clear()
    with pytest.raises(AssertionError, match=r"meshlib fly"):
        test_commands_are_understood("page.md")
    pages.blocks.cache_clear()
