"""The tables of modules at the end of the rooms' pages, from the first lines of docstrings.

`python -m tests.docs.modules` writes them again, after modules have come, gone or changed what they say of themselves.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.docs import pages

TITLE = "## Modules"
SECTION = re.compile(rf"^{TITLE}\n.*?(?=^## |\Z)", re.S | re.M)


def modules(room: Path) -> list[Path]:
    """The files of a room, those of its folders without a page of their own included; of meshlib its root alone."""
    if room == pages.ROOT / "meshlib":
        return sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
    nested = [page.parent for page in room.rglob("README.md") if page.parent != room]
    files = (path for path in room.rglob("*.py") if path.name != "__init__.py")
    files = (path for path in files if not any(path.is_relative_to(folder) for folder in nested))
    return sorted(files, key=lambda path: (len(path.relative_to(room).parts) > 1, path))


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].replace("|", "\\|").rstrip(".:")


def section(room: Path) -> str:
    """The table of a room's modules."""
    rows = ((path.relative_to(room).as_posix(), summary(path)) for path in modules(room))
    table = "".join(f"| [{name.removesuffix('.py')}]({name}) | {text} |\n" for name, text in rows)
    return f"{TITLE}\n\n| module | |\n|---|---|\n{table}"


def with_modules(page: str, room: Path) -> str:
    """A page with the table of its room's modules, at its end or where one is."""
    table = section(room)
    if SECTION.search(page):
        return SECTION.sub(lambda match: table + "\n" * match[0].endswith("\n\n"), page)
    return page.rstrip("\n") + "\n\n" + table


def rooms() -> list[Path]:
    """The folders whose pages have such a table: those of the packages."""
    folders = {(pages.ROOT / page).parent for page in pages.pages()}
    return sorted(folder for folder in folders if (folder / "__init__.py").is_file() and folder.name != "examples")


if __name__ == "__main__":
    for room in rooms():
        file = room / "README.md"
        file.write_text(with_modules(file.read_text(), room))
