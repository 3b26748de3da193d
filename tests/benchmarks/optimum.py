"""The library's programs against the least that `tests/lowering/optimum` finds, over random programs and layouts.

    python tests/benchmarks/optimum.py [pairs] [--seed 0] [--workers 1] [--family chain]

Cost is bytes sent and what the work of one device is worth, by `mtf.Balance`: what the library minimises. Bytes are
compared with the fewest that suffice without doing more work than the library does. Printed: how many pairs are
within 1.0001 of the least, how many are far above it, both by family of programs, and the worst, with what is needed
to see them again:
`--only NUMBER` prints both programs of one pair.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import meshlib as mtf
from tests.lowering.optimum import Comparison, compare
from tests.lowering.pairs import FAMILIES, Pair, pair

SAME = 1.0001

# A pair: its number, family and text, the comparison, and the seconds it took.
Measured: TypeAlias = tuple[int, str, str, Comparison, float]


def measured(task: tuple[int, str | None]) -> Measured:
    """The comparison of one pair."""
    number, family = task
    begin = time.perf_counter()
    p = pair(number, family)
    found = compare(p.outputs, p.updates, p.mesh, p.layout)
    return number, p.family, p.text, found, time.perf_counter() - begin


def row(name: str, found: Sequence[Comparison]) -> str:
    """How one family does."""
    known = [c for c in found if c.known]
    if not known:
        return f"{name:12} {len(found):5} pairs, all given up"
    texts = []
    for ratios in ([c.cost_ratio for c in known], [c.bytes_ratio for c in known]):
        for above in (SAME, 1.25, 1.5):
            share = sum(r <= SAME if above == SAME else r > above for r in ratios) / len(known)
            texts.append(f"{100 * share:6.1f} %")
    sent, least = sum(c.sent for c in known), sum(c.least_bytes for c in known)
    return f"{name:12} {len(found):5} {len(found) - len(known):5} {' '.join(texts)} {sent / max(least, 1):8.4f}"


def show(p: Pair) -> None:
    """Both programs of one pair."""
    found = compare(p.outputs, p.updates, p.mesh, p.layout)
    print(p.text)
    print(mtf.collectives_table(mtf.lower(p.outputs, p.updates, p.mesh, p.layout).collectives))
    print(f"library: {found.sent:g} bytes, work {found.work:g}")
    print(f"least cost: {found.least}\nfewest bytes: {found.fewest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0, help="the first pair's number, in units of 100,000")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--family", choices=list(FAMILIES))
    parser.add_argument("--worst", type=int, default=10)
    parser.add_argument("--only", type=int, help="show one pair, by its number")
    args = parser.parse_args()
    if args.only is not None:
        show(pair(args.only, args.family))
        return
    first = args.seed * 100_000
    tasks = [(n, args.family) for n in range(first, first + args.pairs)]
    if args.workers > 1:
        with ProcessPoolExecutor(args.workers) as pool:
            results = counted(pool.map(measured, tasks, chunksize=4), len(tasks))
    else:
        results = counted(map(measured, tasks), len(tasks))
    report(results, args.worst)


def counted(results: Iterable[Measured], count: int) -> list[Measured]:
    """All results; as each comes, the error stream shows how many pairs are done, and how many are above the least."""
    done: list[Measured] = []
    for each in results:
        done.append(each)
        known = [r[3] for r in done if r[3].known]
        above = sum(c.cost_ratio > SAME for c in known)
        print(f"\r{len(done)} of {count} pairs, {len(known)} known, {above} above", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return done


def report(results: list[Measured], worst: int) -> None:
    """The table, then the worst."""
    print("                          by cost: within   above    above  | by bytes: within  above   above   bytes over")
    print("family       pairs given up  1.0001    1.25     1.5         1.0001    1.25     1.5    the fewest")
    for family in dict.fromkeys(r[1] for r in results):
        print(row(family, [r[3] for r in results if r[1] == family]))
    for loose in (False, True):
        some = [r[3] for r in results if ("?" in r[2].splitlines()[0]) is loose]
        if some:
            print(row("with ?" if loose else "without ?", some))
    print(row("all", [r[3] for r in results]))
    seconds = sorted(r[4] for r in results)
    print(f"{sum(seconds):.0f} s, median {seconds[len(seconds) // 2]:.2f}, longest {seconds[-1]:.1f} s a pair")
    better = [r for r in results if r[3].beaten]
    if better:
        print(f"THE LIBRARY BEATS THE SEARCH in {len(better)} pairs: {[r[0] for r in better]}")
    known = [r for r in results if r[3].known and r[3].cost_ratio > SAME]
    for number, _, text, c, _ in sorted(known, key=lambda r: -r[3].bytes_ratio)[:worst]:
        print(f"\n{number}: bytes {c.sent:g}, fewest {c.least_bytes:g} ({c.bytes_ratio:.3f}); cost {c.cost_ratio:.4f}")
        print(text)


if __name__ == "__main__":
    main()
