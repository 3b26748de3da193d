"""The difference between two estimates, in a sentence."""

from __future__ import annotations

from collections import defaultdict

from meshlib.core.text import bytes_text, seconds_text
from meshlib.estimation import Estimate

SAME = 0.002  # of a step: smaller changes are ignored
MUCH = 0.2  # of the largest change: smaller opposite changes are not mentioned


def difference(
    first: Estimate, second: Estimate, name: str = "", sizes: tuple[int, int] | None = None, unit: str = "tokens"
) -> str:
    """One sentence: changes of step time and memory, with the largest contribution and its reason.

    `name`: that of the second; by default its layout and mesh. `sizes`: tokens (or the `unit`) of a step of each; if
    they differ, times are scaled to those of the first.
    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     x = mtf.input("x", "batch:8192;d:8192", "bfloat16")
      ...     w = mtf.variable("w", "d:8192;f:8192", dtype="bfloat16")
      ...     session = mtf.Session({"y": mtf.einsum([x, w], output_shape="batch:8192;f:8192")})
      >>> a, b = (mtf.estimate(session.lower("a:8", layout), "v5e-8") for layout in ("batch:a", "d:a"))
      >>> difference(a, b).partition(", because ")[2].startswith("it waits")
      True
    """
    share = sizes[0] / sizes[1] if sizes is not None else 1.0
    before, after = first.step_seconds, share * second.step_seconds
    change = after / before - 1 if before else 0.0
    names = name or f"{second.program.layout or '(nothing is split)'} on {second.program.mesh}"
    if second.slice.name not in (first.slice.name, *names.split()):
        names += f" of {second.slice.name}"
    speed = "as fast" if abs(change) < SAME else f"{abs(change):.1%} {'slower' if change > 0 else 'faster'}*"
    more = second.memory.needed_bytes - first.memory.needed_bytes
    needs = "the same memory" if not more else f"{bytes_text(abs(more))}* {'more' if more > 0 else 'less'} memory"
    fits = "" if first.fits == second.fits else ", which fits" if second.fits else ", which does not fit"
    times = f"{seconds_text(before)} to {seconds_text(after)}{_for(sizes, unit)}"
    text = f"{names} is {speed} ({times}) and needs {needs}{fits}"
    return f"{text}{_reason(first, second, change, share)}."


def _for(sizes: tuple[int, int] | None, unit: str) -> str:
    return "" if sizes is None or sizes[0] == sizes[1] else f" for {sizes[0]:,} {unit}"


def _reason(first: Estimate, second: Estimate, change: float, share: float) -> str:
    """The largest change in the step's direction, and the largest opposite one; `share` scales times of the second."""
    if abs(change) < SAME:
        return ""
    sign = 1 if change > 0 else -1
    bounds = {
        name: sign * (share * second.bound_seconds[name] - seconds) for name, seconds in first.bound_seconds.items()
    }
    name, other = (pick(bounds, key=lambda bound: bounds[bound]) for pick in (max, min))
    more, less = ("more", "less") if sign > 0 else ("less", "more")
    collective = _collective(first, second, sign, share) if name in ("ici", "dcn") else ""
    text = f", because {_part(name, max(0.0, bounds[name]), more)}{collective}"
    if -bounds[other] > MUCH * bounds[name] > 0:
        text += f", though {_part(other, -bounds[other], less)}"
    return text


def _part(name: str, seconds: float, more: str) -> str:
    """A change of one part of the step."""
    if name in ("ici", "dcn"):
        return f"it waits {seconds_text(seconds)} {more} for {name.upper()}"
    what = {
        "mxu": "products take", "vpu": "vector operations take", "hbm": "reading and writing HBM takes",
        "latency": "launches and hops take", "pcie": "copies to and from hosts take", "input": "input takes",
    }.get(name, f"{name} takes")  # fmt: skip
    return f"{what} {seconds_text(seconds)} {more}"


def _collective(first: Estimate, second: Estimate, sign: int, share: float) -> str:
    """The kind, axes and tensor of the collective whose time changes most."""
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    largest: dict[tuple[str, str], tuple[float, str]] = {}
    for est, factor in ((first, -sign), (second, sign * share)):
        for row in (r for r in est.rows if r.kind == "collective"):
            key = row.opcode, "+".join(row.axes)
            seconds[key] += factor * row.total_seconds
            largest[key] = max(largest.get(key, (0.0, "")), (row.total_seconds, row.name))
    if not seconds:
        return ""
    key = max(seconds, key=lambda k: seconds[k])
    return f", mostly {key[0]} over {key[1]} of {largest[key][1]}"
