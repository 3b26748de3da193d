"""HTML as text: escaping, tables, and the marks of exact and modelled figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

_TAGS = re.compile(r"<[^>]*>")
EXACT = '<span class="mark" title="exact: counted for this program">=</span>'
MODELLED = '<span class="mark" title="modelled: follows from rates and a schedule">≈</span>'


def asset(name: str) -> str:
    """Text of a file in this folder."""
    return resources.files("meshlib.report").joinpath(name).read_text(encoding="utf-8").rstrip("\n")


def text(value: object) -> str:
    """Any value as escaped text.

    >>> text("a < b & 'c'")
    'a &lt; b &amp; &#x27;c&#x27;'
    """
    return escape(str(value))


def scoped(name: str) -> str:
    """A scoped name as escaped text that lines break behind slashes.

    >>> scoped("layers/wi")
    'layers/<wbr>wi'
    """
    return text(name).replace("/", "/<wbr>")


def tag(name: str, content: str = "", **attributes: object) -> str:
    """One HTML element. `content` is HTML; attributes are escaped, None ones are left out, `_` becomes `-`.

    >>> tag("a", text("to <b>"), href="#op-1", class_="x", title=None)
    '<a href="#op-1" class="x">to &lt;b&gt;</a>'
    """
    return f"<{name}{attributes_text(attributes)}>{content}</{name}>"


def attributes_text(attributes: dict[str, object]) -> str:
    """Attributes of an element, each after a blank."""
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    return "".join(f' {key}="{escape(str(value))}"' for key, value in given)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    ids: Sequence[str | None] = (),
    sortable: bool = False,
    long: Sequence[int] = (),
    short: Sequence[int] = (),
) -> str:
    """A table in a container that scrolls horizontally on narrow pages; with long columns, each row is stacked there.

    Args:
      head: column titles, HTML.
      rows: cells, HTML.
      right: columns of numbers, aligned to the right.
      ids: the anchor of each row, if it has one.
      long: columns of sentences or scoped names, which are wide; short: of words, which are never broken.
      sortable: whether a click on a title sorts, where scripts run.
    """

    kinds = {**dict.fromkeys(short, "short"), **dict.fromkeys(right, "number"), **dict.fromkeys(long, "long")}
    titles = [_TAGS.sub("", title).strip() for title in head] if long else []  # shown in each cell of a stacked row

    def line(cells: Sequence[str], cell: str, titles: Sequence[str], anchor: str | None = None) -> str:
        columns = (
            tag(cell, c, class_=kinds.get(k), data_head=titles[k] or None if titles else None)
            for k, c in enumerate(cells)
        )
        return tag("tr", "".join(columns), id=anchor)

    body = [line(row, "td", titles, ids[n] if n < len(ids) else None) for n, row in enumerate(rows)]
    inner = tag("thead", line(head, "th", [])) + tag("tbody", "\n".join(body))
    container = "scroll stacked" if long else "scroll"
    return tag("div", tag("table", inner, class_="sortable" if sortable else None), class_=container)


def folding_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    shown: int,
    what: str,
    right: Sequence[int] = (),
    ids: Sequence[str | None] = (),
    **options: Any,
) -> str:
    """A table whose rows after the first `shown` are folded under "N more" and `what`; "" without rows.

    Args:
      head, rows, right, ids, options: as `table`.
    """
    if not rows:
        return ""
    first = table(head, rows[:shown], right, ids[:shown], **options)
    if not rows[shown:]:
        return first
    return first + folded(f"{len(rows) - shown} more{what}", table(head, rows[shown:], right, ids[shown:], **options))


def section(anchor: str, title: str, *parts: str) -> str:
    """A section of the page; empty parts are left out."""
    return tag("section", "\n".join([tag("h2", text(title)), *(p for p in parts if p)]), id=anchor)


def paragraph(content: str) -> str:
    """A paragraph of HTML."""
    return tag("p", content)


def folded(title: str, content: str, is_open: bool = False) -> str:
    """A section that readers can unfold, without scripts."""
    return f"<details{' open' if is_open else ''}>{tag('summary', text(title))}{content}</details>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Legend of a picture, from (colour class, name) pairs."""
    items = (tag("span", f'<i class="key {class_}"></i>{text(name)}') for class_, name in entries)
    return tag("p", " ".join(items), class_="legend")
