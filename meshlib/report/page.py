"""One self-contained HTML file about a program on a slice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from meshlib.core.errors import GraphError
from meshlib.core.files import replace_file
from meshlib.core.version import VERSION
from meshlib.estimation import Estimate, estimate
from meshlib.program.records import Program
from meshlib.report.alternatives import Alternative, alternatives
from meshlib.report.collectives import collectives
from meshlib.report.layout import layout
from meshlib.report.links import PageAnchors
from meshlib.report.markup import asset, section, tag, text
from meshlib.report.memory import memory
from meshlib.report.operations import operations
from meshlib.report.roofline import roofline
from meshlib.report.stages import stages
from meshlib.report.timeline import timeline
from meshlib.report.torus import torus
from meshlib.report.verdict import about, verdict


def page(
    est: Estimate, title: str = "", options: Sequence[Alternative] = (), certificate: str = "", compiled: object = None
) -> str:
    """The page as text.

    Args:
      est: the estimate that the page shows.
      title: by default mesh and slice.
      options: the other layouts estimated; certificate: what the search proved about all others.
      compiled: the real compiler's report on the program, shown as text.
    """
    anchors = PageAnchors.of(est)
    parts = [
        ("torus", "mesh", torus(est)),
        ("layout", "layout", layout(est)),
        ("memory", "memory", memory(est, anchors)),
        ("timeline", "timeline", section("timeline", "Timeline by engine", timeline(est, anchors))),
        ("stages", "stages", stages(est)),
        ("roofline", "roofline", roofline(est, anchors)),
        ("collectives", "collectives", collectives(est, anchors)),
        ("alternatives", "alternatives", alternatives(options, est.memory.capacity_bytes, certificate)),
        ("compiler", "compiler", _compiled(compiled)),
        ("operations", "operations", operations(est, anchors)),
        ("about", "about", section("about", "What was estimated", about(est))),
    ]
    name = title or f"mesh {est.program.mesh} on {est.slice.name}"
    return Template(asset("page.html")).substitute(
        title=text(name),
        style=asset("page.css"),
        script=asset("page.js"),
        version=text(VERSION),
        verdict=verdict(est),
        contents="".join(tag("a", text(word), href=f"#{anchor}") for anchor, word, content in parts if content),
        sections="\n".join(content for _, _, content in parts if content),
    )


def report_program(program: Program, path: object, slice: Any, title: str = "") -> None:
    """`Program.report`."""
    write_page(path, page(estimate(program, slice), title), "Program.report")


def write_page(path: object, content: str, what: str) -> None:
    """Write a page atomically.

    Raises: GraphError that begins with `what`, for a path that is none or cannot be written.
    """
    if not isinstance(path, str | Path) or not str(path):
        raise GraphError(f"{what}: path must be that of a file, such as 'plan.html', got {path!r:.80}")
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise GraphError(f"{what}: the path must end in .html, got {str(path)!r}")
    replace_file(path, lambda file: file.write(content.encode()), what, GraphError)


def _compiled(said: object) -> str:
    if said is None:
        return ""
    return section("compiler", "What the compiler said", tag("div", tag("pre", text(said)), class_="scroll"))
