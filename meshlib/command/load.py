"""`meshlib serve --rate`: serving under a load, and the number of slices that it needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from meshlib.command.figures import picked
from meshlib.command.output import say, say_json, say_verdict
from meshlib.command.terminal import FAILED, GOOD
from meshlib.core.errors import GraphError
from meshlib.core.text import seconds_text
from meshlib.searching.arrivals import Arrivals
from meshlib.searching.served_load import ServedLoad
from meshlib.searching.serving_result import Serving


def load_of(args: argparse.Namespace) -> Arrivals | None:
    """The load that the arguments describe, or None."""
    drawn = {name: getattr(args, name) for name in ("prompts", "outputs", "requests")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if args.trace is not None:
        given = [name for name in ("rate", *drawn) if name in drawn or args.rate is not None]
        if given:
            raise GraphError(f"serve: --trace has its own rate and lengths; omit --{given[0]}")
        return Arrivals.trace(args.trace)
    if args.rate is not None:
        return Arrivals(args.rate, **drawn)
    beside = [*drawn, *(name for name in ("chunk", "separate", "first_token") if getattr(args, name))]
    if beside:
        raise GraphError(f"serve: --{beside[0].replace('_', '-')} needs a load; give --rate or --trace")
    return None


def print_load(args: argparse.Namespace, result: Serving, notes: Sequence[str]) -> int:
    """Print the verdict on a load, the best layout and the fewest slices for it; returns the exit status."""
    goals = {
        "first_token_seconds": None if args.first_token is None else args.first_token / 1e3,
        "token_seconds": None if args.within is None else args.within / 1e3,
    }
    best, fleet = result.load_within(**goals), result.fleet(**goals)
    code = GOOD if fleet is not None else FAILED
    if args.json:
        say_json(
            {
                "best": None if best is None else _entry(best),
                "fleet": None
                if fleet is None
                else {**picked(fleet, "slices chips usd_per_hour"), **_entry(fleet.load)},
                "loads": [_entry(load) for load in result.loads],
            }
        )
        return code
    name = f"{result.config.name} on {result.slice.name}: {result.loads[0].arrivals}"
    asked = "".join(
        f", {what} within {milliseconds:g} ms"
        for what, milliseconds in (("first tokens", args.first_token), ("others", args.within))
        if milliseconds is not None
    )
    if fleet is None:
        say_verdict(f"{name}{asked}: NOT SERVED by any number of these slices", False)
    else:
        say_verdict(f"{name}{asked}", True)
        say("\n".join([f"  slices     {fleet}*", *_about(fleet.load)]))
    say("\n".join(["", str(result), *notes]))
    return code


def _about(load: ServedLoad) -> list[str]:
    first, token = (
        f"{seconds_text(of(50))}* (median), {seconds_text(of(99))}* (99 %)"
        for of in (load.first_token_seconds, load.token_seconds)
    )
    return [
        f"  load       {load.arrivals.rate:.4g} requests/s on each, {load.tokens_per_second:,.0f}* tokens/s",
        f"  first      {first}",
        f"  a token    {token}",
        f"  queue      {load.queue_length:,.2f}* requests on the mean, {load.longest_queue}* at most",
    ]


def _entry(load: ServedLoad) -> dict[str, object]:
    read, decode = load.utilisation
    return {
        "layout": load.name,
        **picked(load, "slots", "keeps_up tokens_per_second queue_length"),
        "first_token_seconds_modelled": {str(p): load.first_token_seconds(p) for p in (50, 99)},
        "token_seconds_modelled": {str(p): load.token_seconds(p) for p in (50, 99)},
        "reading_share_modelled": read,
        "decoding_share_modelled": decode,
    }
