"""Ring collectives step by step: which block goes where, and what every node holds afterwards.

    all_gather      in step t node i passes block i - t on to i + 1
    reduce_scatter  in step t node i passes its partial sum of block i - t - 1 on to i + 1, which adds its own part
    all_reduce      a reduce_scatter, then an all_gather of the sums
    all_to_all      in step t node i sends node i + t what is meant for it, t links away

Numbers of nodes are modulo n. Sums are added in the order of `hardware.numerics.ring_reduce_scatter`, bit for bit. One
way round the ring; `hardware.ring_plans` has both ways, tori and time.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69(2), 2009.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hardware.cells import COLOURS
from hardware.checks import HardwareError, amount, one_of, whole
from hardware.collective_kinds import COLLECTIVE_KINDS, Phase
from hardware.drawing import axes_of, figure_of, write_animation
from hardware.unknown_names import Attributes

Array = NDArray[Any]
Held = tuple[tuple[Array | None, ...], ...]  # [node][block]; None: the node has no part of it

KINDS = tuple([name for name, kind in COLLECTIVE_KINDS.items() if kind.is_staged])
SHOWN = 4  # most elements shown of each block
WIDTH = 80  # columns of text
LETTERS = 12  # in a line of a drawn block: 0.85 inches at 8 points


@dataclass(frozen=True, eq=False)
class BlockTransfer:
    """A block sent in one step, and whether the receiver adds it to its own."""

    sender: int
    receiver: int
    block: int
    value: Array
    adds: bool = False
    links: int = 1  # links crossed


@dataclass(frozen=True, eq=False)
class RingStep(Attributes):
    """One step: all its transfers are simultaneous; `held` is each node's data afterwards, [node][block]."""

    number: int
    phase: str
    transfers: tuple[BlockTransfer, ...]
    held: Held

    def __repr__(self) -> str:
        return f"<step {self.number}, {self.phase}: {len(self.transfers)} transfers>"

    def __str__(self) -> str:
        if not self.transfers:
            return "\n".join(["start", *_rows(self)])
        verb = "add" if self.transfers[0].adds else "store"
        transfers = [f"{t.sender} > {t.receiver}: block {t.block}" for t in self.transfers]
        head = f"step {self.number}, {self.phase}, receivers {verb} blocks:"
        return "\n".join([*_wrapped(head, transfers), *_rows(self)])


@dataclass(frozen=True, eq=False)
class RingRun(Attributes):
    """All steps of a collective, starting with its initial state; a notebook shows them one after the other.

    Attributes:
      kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
      steps: `RingStep`s; step 0 is the initial state.
      results: final array of each node: [nodes, *operand shape] for an all_gather, flat for others.
    """

    kind: str
    steps: tuple[RingStep, ...]
    results: tuple[Array, ...]

    def __repr__(self) -> str:
        return f"<{self.kind} of {len(self.results)} nodes: {self._step_count()}>"

    def _step_count(self) -> str:
        count = len(self.steps) - 1
        return f"{count} step{'s' * (count != 1)}"

    def __str__(self) -> str:
        nodes = " > ".join(map(str, [*range(len(self.results)), 0]))
        head = f"{self.kind} on the ring {nodes}: {self._step_count()}."
        return "\n\n".join(
            ["\n".join(_wrapped(head, ["* arrived in this step", ". nothing there"])), *map(str, self.steps)]
        )

    def _repr_html_(self) -> str:
        parts = [f"<p>{escape(str(self).partition(2 * chr(10))[0])}</p>"]
        for step in self.steps:
            arrived = {(t.receiver, t.block) for t in step.transfers}
            rows = []
            for node, blocks in enumerate(step.held):
                cells = "".join(_cell(shown(b), (node, n) in arrived) for n, b in enumerate(blocks))
                rows.append(f"<tr><th>node {node}</th>{cells}</tr>")
            title = f"step {step.number}: {step.phase}" if step.number else "start"
            parts.append(
                "<table style='display:inline-table;margin:0 1em 1em 0;border-collapse:collapse'>"
                f"<caption>{title}</caption>{''.join(rows)}</table>"
            )
        return "".join(parts)

    def plot(self, step: int = 0, ax: Any = None) -> Any:
        """Draw one step: a row for each node, a square for each block, arrows for what is sent.

        Args:
          step: its number; 0 is the start.
          ax: matplotlib Axes; by default those of a new figure.
        Returns: the Axes.
        Raises: HardwareError for another step, where matplotlib is not installed, or `ax` is something else.
        """
        return plot_step(self, step, ax)

    def save(self, path: str | Path, seconds: float = 1.0) -> None:
        """Write the steps as an animated GIF, each shown for `seconds`; needs matplotlib and Pillow.

        Raises: HardwareError where they are not installed, or the file is not a .gif or can't be written.
        """
        save_gif(self, Path(path), seconds)


def ring_steps(kind: str, data: Sequence[Any]) -> RingRun:
    """Run a collective on a ring of nodes, step by step.

    Args:
      kind: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
      data: one array per node, equal shapes and dtypes. All but all_gather cut the flattened arrays in as many blocks
        as there are nodes.
    Returns: RingRun: print it, show it in a notebook, `.plot(step)`, `.save("ring.gif")`.
    Raises: HardwareError for another kind, fewer than two nodes, unequal arrays.
    Example:
      >>> run = ring_steps("all_reduce", [[1, 2], [10, 20]])
      >>> print(run.steps[1])
      step 1, reduce_scatter, receivers add blocks: 0 > 1: block 1, 1 > 0: block 0
        node 0   11*   .
        node 1   .     22*
      >>> [result.tolist() for result in run.results]
      [[11, 22], [11, 22]]
    """
    one_of("kind", kind, KINDS)
    arrays = _checked(data)
    phases = COLLECTIVE_KINDS[kind].phases
    pieces = [np.array_split(a.reshape(-1), len(arrays)) for a in arrays]
    steps = [RingStep(0, "start", (), _begin(phases[0], arrays, pieces))]
    for phase in phases:
        held, first = steps[-1].held, len(steps)
        if phase is Phase.GATHER:
            steps += _gathered(held, first)
        elif phase is Phase.REDUCE:
            steps += _reduced(held, first)
        else:
            steps += _exchanged(held, first, pieces)
    results = [_result(phases, node, row, arrays) for node, row in enumerate(steps[-1].held)]
    return RingRun(kind, tuple(steps), tuple(results))


def _begin(phase: Phase, arrays: Sequence[Array], pieces: Sequence[Sequence[Array]]) -> Held:
    """The nodes' initial data: for a reduction all blocks of their operand, otherwise their own block."""
    if phase is Phase.REDUCE:
        return tuple(map(tuple, pieces))
    own = arrays if phase is Phase.GATHER else [row[node] for node, row in enumerate(pieces)]
    return tuple(tuple(a if b == node else None for b in range(len(arrays))) for node, a in enumerate(own))


def _gathered(held: Held, first: int) -> Iterator[RingStep]:
    n = len(held)
    for t in range(n - 1):
        transfers = tuple(BlockTransfer(i, (i + 1) % n, (i - t) % n, _block(held, i, (i - t) % n)) for i in range(n))
        held = _held_after(held, transfers)
        yield RingStep(first + t, Phase.GATHER.value, transfers, held)


def _reduced(held: Held, first: int) -> Iterator[RingStep]:
    n = len(held)
    for t in range(n - 1):
        blocks = [(i - t - 1) % n for i in range(n)]
        transfers = tuple(BlockTransfer(i, (i + 1) % n, b, _block(held, i, b), True) for i, b in enumerate(blocks))
        held = _held_after(held, transfers)
        yield RingStep(first + t, Phase.REDUCE.value, transfers, held)


def _exchanged(held: Held, first: int, pieces: Sequence[Sequence[Array]]) -> Iterator[RingStep]:
    n = len(held)
    for t in range(1, n):
        transfers = tuple(BlockTransfer(i, (i + t) % n, i, pieces[i][(i + t) % n], links=t) for i in range(n))
        held = _held_after(held, transfers)
        name = f"{Phase.EXCHANGE.value} over {t} link" + "s" * (t > 1)
        yield RingStep(first + t - 1, name, transfers, held)


def _block(held: Held, node: int, block: int) -> Array:
    value = held[node][block]
    assert value is not None
    return value


def _held_after(held: Held, transfers: Sequence[BlockTransfer]) -> Held:
    """Each node's data once all transfers have arrived; a partial sum that was sent on is no longer held."""
    table = [list(row) for row in held]
    for t in transfers:
        table[t.receiver][t.block] = t.value + _block(held, t.receiver, t.block) if t.adds else t.value
    for t in transfers:
        if t.adds:
            table[t.sender][t.block] = None
    return tuple(map(tuple, table))


def _result(phases: tuple[Phase, ...], node: int, row: Sequence[Array | None], arrays: Sequence[Array]) -> Array:
    if phases[-1] is Phase.REDUCE:
        own = row[node]
        assert own is not None
        return own
    whole = [block for block in row if block is not None]
    if phases[0] is Phase.GATHER:
        return np.stack(whole)
    flat = np.concatenate(whole)
    return flat if phases[-1] is Phase.EXCHANGE else flat.reshape(arrays[0].shape)


def _checked(data: Sequence[Any]) -> list[Array]:
    try:
        arrays = [np.asarray(part) for part in data]
    except (TypeError, ValueError) as fault:
        raise HardwareError(f"ring_steps: data must be one array per node, got {data!r:.80}") from fault
    if len(arrays) < 2:
        raise HardwareError(f"ring_steps: a ring has at least 2 nodes, got {len(arrays)} arrays")
    if len({(a.shape, a.dtype) for a in arrays}) > 1 or arrays[0].dtype.kind not in "fiu":
        types = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays[:4])
        raise HardwareError(f"ring_steps: arrays must be numbers of equal shape and dtype, got {types}")
    return arrays


def _cell(text: str, new: bool) -> str:
    style = "border:1px solid;padding:2px 6px" + (";background:#ffb70380" if new else "")
    return f"<td style='{style}'>{escape(text)}</td>"


def shown(block: Array | None, most: int = SHOWN) -> str:
    """A block as the text of a table cell: up to `most` elements; "." for None."""
    if block is None:
        return "."
    if not block.size:  # with fewer elements than nodes
        return "-"
    values = [f"{x:.4g}" for x in block.reshape(-1)[:most]]
    return " ".join(values) + (" .." if block.size > most else "")


def _wrapped(head: str, items: Sequence[str]) -> list[str]:
    """The head and a list behind it, in lines that break between items."""
    bound = ", ".join(item.replace(" ", "\xa0") for item in items)
    return [line.replace("\xa0", " ") for line in textwrap.wrap(f"{head} {bound}", WIDTH, subsequent_indent="  ")]


def _rows(step: RingStep) -> list[str]:
    """A line for each node, with as many elements of each block as fit the width, at least one."""
    tables = (_table(step, most) for most in range(SHOWN, 0, -1))
    return next((rows for rows in tables if max(map(len, rows)) <= WIDTH), _table(step, 1))


def _table(step: RingStep, most: int) -> list[str]:
    arrived = {(t.receiver, t.block) for t in step.transfers}
    cells = [
        [shown(b, most) + "*" * ((node, n) in arrived) for n, b in enumerate(row)] for node, row in enumerate(step.held)
    ]
    widths = [max(len(row[n]) for row in cells) for n in range(len(cells))]
    return [
        f"  node {node:<2}  " + "  ".join(c.ljust(w + 1) for c, w in zip(row, widths, strict=True)).rstrip()
        for node, row in enumerate(cells)
    ]


def plot_step(run: RingRun, number: int, ax: Any) -> Any:
    """`RingRun.plot`."""
    if whole("step", number) >= len(run.steps):
        raise HardwareError(f"step {number} is not one of the {len(run.steps)} steps of this run, from 0")

    step, n = run.steps[number], len(run.results)
    axes = axes_of("RingRun.plot", ax, (2.4 + n, 1.2 + n))
    axes.clear()
    title = f"{run.kind}: " + (f"step {number} of {len(run.steps) - 1}, {step.phase}" if number else "start")
    axes.set(xlim=(-1.2, n + 0.1), ylim=(n, -0.3), aspect="equal", title=title)
    axes.axis("off")
    from matplotlib.patches import Rectangle

    arrived = {(t.receiver, t.block) for t in step.transfers}
    for b in range(n):
        axes.text(b + 0.45, -0.1, f"block {b}", ha="center", va="bottom", fontsize=8)
    for node, row in enumerate(step.held):
        axes.text(-0.15, node + 0.45, f"node {node}", ha="right", va="center", fontsize=9)
        for b, block in enumerate(row):
            colour = "white" if block is None else COLOURS[b % len(COLOURS)]
            width = 2.5 if (node, b) in arrived else 0.8
            axes.add_patch(Rectangle((b, node), 0.9, 0.9, facecolor=colour, edgecolor="black", linewidth=width))
            content = shown(block)
            content = content if len(content) <= LETTERS else content.replace(" ", "\n")
            axes.text(b + 0.45, node + 0.45, content, ha="center", va="center", fontsize=8)
    for t in step.transfers:
        begin, end = (t.block + 0.8, t.sender + 0.75), (t.block + 0.8, t.receiver + 0.15)
        style = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.3", "color": "#444444"}
        axes.annotate("", xy=end, xytext=begin, arrowprops=style)
    return axes


def save_gif(run: RingRun, path: Path, seconds: float) -> None:
    """`RingRun.save`."""
    if path.suffix.lower() != ".gif":
        raise HardwareError(f"RingRun.save writes a .gif, not {path.name!r}")
    amount("seconds", seconds, positive=True)
    n = len(run.results)
    axes = figure_of("RingRun.save", (2.4 + n, 1.2 + n)).add_subplot()
    try:
        write_animation(axes.figure, lambda step: plot_step(run, step, axes), len(run.steps), path, 1 / seconds)
    except OSError as fault:
        raise HardwareError(f"RingRun.save: {path} can't be written: {fault.strerror or fault}") from None
