"""The pages of the documentation, and what their fenced blocks promise.

A fence says how its block is tested:

    python         runs, after those before it on the page, in one namespace and an empty folder
    python deep    the same, in the deep profile only; by default it must compile
    text           directly after a python block: lines that the block prints
    console        "$ meshlib ..." and lines that it prints: its arguments are parsed, in the deep profile it is run
    sh             commands: files and flags that they name exist

Lines of output that contain "..." are not compared: there the page is abridged. `python -m tests.docs.pages` runs all
console blocks, or those of the pages named, and reports the lines that have changed.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.paths import ROOT

PACKAGES = ("meshlib", "layouts", "hardware")
FENCES = ("python", "python deep", "text", "console", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str  # path from the root
    line: int
    fence: str
    text: str
    adjacent: bool  # nothing but blank lines between the block before and this one

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def rooms() -> list[Path]:
    """Folders that need a page: every package, every folder of meshlib with code, and the examples."""
    inside = [path.parent for path in sorted((ROOT / "meshlib").glob("*/__init__.py"))]
    return [*(ROOT / name for name in PACKAGES), *inside, ROOT / "examples"]


def pages() -> list[str]:
    """All pages, as paths from the root: what is at the root, then those of the rooms and of folders within them."""
    top = sorted(path.name for path in ROOT.glob("*.md"))
    under = [path for name in (*PACKAGES, "examples", "tests") for path in sorted((ROOT / name).rglob("*.md"))]
    return [*top, *(path.relative_to(ROOT).as_posix() for path in under)]


def read(page: str) -> str:
    return (ROOT / page).read_text()


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """The fenced blocks of a page in their order."""
    text, end = read(page), 0
    read_blocks = []
    for fence in re.finditer(r"^```([^\n]+)\n(.*?)^```$", text, re.S | re.M):
        line = text.count("\n", 0, fence.start()) + 2
        read_blocks.append(Block(page, line, fence[1], fence[2], not text[end : fence.start()].strip()))
        end = fence.end()
    return tuple(read_blocks)


def differing(shown: str, printed: str) -> list[str]:
    """The lines of an output shown on a page that are not printed; "..." stands for any text of a line, or lines."""
    lines = [line.rstrip() for line in printed.splitlines()]

    def is_printed(line: str) -> bool:
        pattern = re.compile(".*".join(map(re.escape, line.rstrip().split("..."))))
        return any(map(pattern.fullmatch, lines))

    return [line for line in shown.splitlines() if line.strip() and not is_printed(line)]


def run_python(page: str, deep: bool) -> dict[str, object]:
    """Runs a page's blocks of Python one after the other; what they print is compared with what the page shows."""
    space: dict[str, object] = {"__name__": "page"}
    printed = None
    for block in blocks(page):
        if block.fence == "text" and block.adjacent and printed is not None:
            assert not differing(block.text, printed), f"{block.where}: {differing(block.text, printed)}\n{printed}"
        printed = None
        if block.fence.startswith("python"):
            code = compile(block.text, "model.py", "exec")
            if deep or block.fence == "python":
                stream = io.StringIO()
                with contextlib.redirect_stdout(stream):
                    try:
                        exec(code, space)
                    except Exception as fault:
                        fault.add_note(f"in the block at {block.where}")
                        raise
                printed = stream.getvalue()
    return space


def commands(page: str) -> Iterator[tuple[Block, list[str], str]]:
    """The commands of a page's console blocks, each with its arguments and the output that is shown below it."""
    for block in blocks(page):
        if block.fence == "console":
            parts = re.split(r"^\$ ", block.text, flags=re.M)
            assert not parts[0], f"{block.where}: a console block begins with its command"
            for part in parts[1:]:
                match = re.match(r"(?:[^\n]*\\\n)*[^\n]*", part)  # lines that end with a backslash go on
                assert match is not None
                command = match[0].replace("\\\n", " ")
                yield block, shlex.split(command, comments=True), part[match.end() :].removeprefix("\n")


def run_command(command: list[str]) -> str:
    """What `meshlib ...` or `python FILE ...` prints, run in the root of the checkout."""
    program = ["-m", "meshlib"] if command[0] == "meshlib" else []
    done = subprocess.run(
        [sys.executable, *program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False
    )
    return done.stdout + done.stderr


def main(names: list[str]) -> int:
    """Reports the console blocks whose output is no longer what the page shows."""
    changed = 0
    for page in names or pages():
        for block, command, shown in commands(page):
            printed = run_command(command)
            lines = differing(shown, printed)
            changed += bool(lines)
            print(f"{block.where}: {shlex.join(command)}: {f'{len(lines)} lines differ' if lines else 'as shown'}")
            if lines:
                print("".join(f"  - {line}\n" for line in lines) + printed)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
