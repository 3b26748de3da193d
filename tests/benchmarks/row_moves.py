"""What gathers and scatter-adds of rows cost a core, by the code of a TPU compiler; run by hand: python
tests/benchmarks/row_moves.py --chip v5p --width 7168

Compiles `jnp.take` of bfloat16 rows and its gradient ahead of time for one chip (no device is needed, but JAX with
libtpu is), which states no cycles for them, and counts the instruction bundles of their loops. A gather starts a copy
for each row of a block, waits for all, then unpacks them. A scatter-add sorts its rows by destination and takes each
block of rows once for every block of the result that has one of them: with N rows to as many destinations, blocks of U
rows and O destinations, (1 + U / O) times the bundles of a row. Waits for copies are not in the bundles.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

ROWS = 65536
LANES = 128
PACKED_ROWS = 16  # bfloat16 rows in a register
WHAT = ("take", "take_gradient")


def compile_one(chip: str, what: str, width: int) -> None:
    """Compile one of `WHAT` in this process, whose flags say where the compiler writes its code."""
    import jax
    import jax.numpy as jnp

    from tests.benchmarks.single_operations import compiled  # its import sets the environment of the compiler

    def gradient(x: jax.Array, at: jax.Array, g: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: jnp.take(x, at, axis=0), x)[1](g)[0]

    table, at = ((ROWS, width), "bfloat16"), ((ROWS,), "int32")
    if what == "take":
        compiled(chip, lambda x, at: jnp.take(x, at, axis=0), [table, at])
    else:
        compiled(chip, gradient, [table, at, table])


def code(chip: str, what: str, width: int) -> Iterator[str]:
    """The bundles of each kernel of a program, as text."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=true"
        command = [sys.executable, __file__, "--chip", chip, "--width", str(width), "--compile", what]
        subprocess.run(command, check=True, env={**os.environ, "LIBTPU_INIT_ARGS": flags}, capture_output=True)
        for path in Path(folder).glob("*-final_bundles.txt"):
            if "schedule-analysis" not in path.name:
                yield path.read_text(errors="replace")


def segments(text: str) -> Iterator[tuple[int, list[str]]]:
    """Runs of bundles at one depth of loops: (depth, bundles)."""
    depth, run = 0, list[str]()
    for line in text.splitlines():
        bundle = re.match(r"\s*(?:0x[0-9a-f]+|0)\s.*?\{", line)
        if bundle is None:
            continue
        here = bundle[0].count(">")
        if here != depth and run:
            yield depth, run
            run = []
        depth = here
        run.append(line)
    yield depth, run


def count(run: list[str], instruction: str) -> int:
    return sum(len(re.findall(rf"= {instruction}\b", line)) for line in run)


def gather(chip: str, width: int) -> str:
    """Bundles of a gathered row: those of the loop that starts a copy for each."""
    blocks = [run for text in code(chip, "take", width) for depth, run in segments(text) if depth == 1]
    run = max(blocks, key=lambda run: count(run, r"dma\.hbm_to_vmem"))
    copies = count(run, r"dma\.hbm_to_vmem")
    return f"gather: {len(run) / copies:.0f} bundles a row, {copies} copies at once"


def scatter(chip: str, width: int) -> str:
    """Bundles of a row that is added: those of the loop over blocks of destinations, and how often it takes a row."""
    texts = [text for text in code(chip, "take_gradient", width) if "scatter" in text]
    text = max(texts, key=lambda text: text.count("vadd.f32"))
    inner = [run for depth, run in segments(text) if depth == 2]
    added = max(inner, key=lambda run: count(run, r"vadd\.f32"))
    written = max(count(run, r"vpack\.c\.bf16") for run in inner)
    chunks = -(-width // LANES)
    rows, destinations = count(added, r"vadd\.f32") // chunks, written * PACKED_ROWS // chunks
    once, times = len(added) / rows, 1 + rows / destinations
    blocks = f"blocks of {rows} rows and {destinations} destinations"
    return f"scatter-add: {once:.0f} bundles a row, {times:.2f} times: {once * times:.0f}; {blocks}"


def main() -> None:
    """Print both for one chip and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", default="v5p")
    parser.add_argument("--width", type=int, default=4096, help="elements of a row, a multiple of 128")
    parser.add_argument("--compile", choices=WHAT, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compile:
        compile_one(args.chip, args.compile, args.width)
        return
    for of in (gather, scatter):
        print(f"{args.chip}, rows of {args.width}, {of(args.chip, args.width)}", flush=True)


if __name__ == "__main__":
    main()
