"""`meshlib serve`: batch and layout of decoding against latency, throughput and cost."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from hardware.slices import Slice
from meshlib.command.choices import is_maxtext
from meshlib.command.figures import picked
from meshlib.command.load import load_of, print_load
from meshlib.command.output import say, say_json, say_verdict
from meshlib.command.subject import slice_of, subject_of
from meshlib.command.terminal import FAILED, GOOD
from meshlib.core.compiler import COMPILERS
from meshlib.core.errors import GraphError
from meshlib.core.text import bytes_text, counted, seconds_text, usd_text
from meshlib.models import TransformerConfig
from meshlib.searching.serving import serving
from meshlib.searching.serving_result import Serving, ServingPoint

CONTEXT = 2048


def serve(args: argparse.Namespace) -> int:
    """`meshlib serve`: the frontier, the cheapest point, and the best within a latency."""
    where = slice_of(args.slice)
    if is_maxtext(args):
        from meshlib.command.configured_serving import asked_of

        asked = asked_of(args, where)
    else:
        asked = _asked(args, where)
    load = load_of(args)
    result = serving(
        asked.config, where, context=args.context if load is not None else asked.context, prompt=asked.prompt,
        batches=asked.batches, weight_dtype=asked.weights, cache_dtype=asked.caches, compiler=COMPILERS[args.compiler],
        arrivals=load, chunk=args.chunk, separate=args.separate,
    )  # fmt: skip
    if load is not None and result.loads:
        return print_load(args, result, asked.notes)
    best = _chosen(args, result)
    if args.json:
        say_json({"best": None if best is None else _entry(best), "points": [_entry(p) for p in result.points]})
        return GOOD if best is not None else FAILED
    say_verdict(_verdict(args, result, best), best is not None)
    if best is not None:
        say("\n".join(_about(best)))
    say("\n".join(["", str(result), *asked.notes]))
    if args.plot:
        result.plot(args.plot)
    return GOOD if best is not None else FAILED


@dataclass(frozen=True)
class ServingTask:
    """A serving task: arguments of `mtf.serving`, and notes on features that are not expressed."""

    config: TransformerConfig
    context: int
    prompt: int | None = None
    batches: Sequence[int] | None = None
    weights: str | None = None
    caches: str | None = None
    notes: tuple[str, ...] = ()


def _asked(args: argparse.Namespace, where: Slice) -> ServingTask:
    """The task of a model by name or a config.json."""
    for flag in ("length", "remat"):
        if getattr(args, flag, None):
            raise GraphError(f"--{flag} is for training; serving has --context and --prompt")
    subject = subject_of(args, where)
    if subject.config is None:
        raise GraphError(f"{subject.name}: serve takes a Transformer of the library, a config.json or a MaxText file")
    if subject.step:
        raise GraphError(f"--set {next(iter(subject.step))} is of a training step; leave it out for serving")
    if subject.config.kind != "decoder":
        raise GraphError(f"serve takes decoders, and {subject.name} is an {subject.config.kind}; see meshlib models")
    context = args.context or min(CONTEXT, subject.config.max_length or CONTEXT)
    batches = [args.batch] if args.batch else None
    return ServingTask(subject.config, context, args.prompt, batches, args.weights, args.caches)


def _chosen(args: argparse.Namespace, result: Serving) -> ServingPoint | None:
    """The cheapest point within the latency goals."""
    if args.within is not None:
        return result.within(args.within / 1e3)
    return result.frontier[-1] if result.frontier else None


def _verdict(args: argparse.Namespace, result: Serving, best: ServingPoint | None) -> str:
    name = f"{result.config.name} on {result.slice.name}"
    if best is not None:
        return f"{name}: {best.tokens_per_second:,.0f}* tokens/s, {seconds_text(best.token_seconds)}* a token"
    if not result.points:
        largest = max(result.largest.values(), default=0)
        if not largest:
            return f"{name}: DOES NOT FIT with any batch; take a larger slice or --weights int8"
        return (
            f"{name}: NO LAYOUT takes a batch of {args.batch:,}; use a multiple of {result.slice.devices}, at most "
            f"{largest:,}"
        )
    fastest = seconds_text(result.frontier[0].token_seconds)
    return f"{name}: NO BATCH answers within {args.within:g} ms a token; the fastest takes {fastest}*"


def _about(p: ServingPoint) -> list[str]:
    cost, capacity = p.usd_per_million_tokens, p.decode.memory.capacity_bytes
    return [
        f"  layout     {p.name}",
        f"  batch      {counted(p.batch, 'sequence')}",
        f"  prefill    {seconds_text(p.prefill_seconds)}* until the first token",
        f"  memory     needs {bytes_text(p.needed_bytes)}* of {bytes_text(capacity)} on each device",
        *([] if cost is None else [f"  price      {usd_text(cost)}* a million tokens"]),
    ]


def _entry(p: ServingPoint) -> dict[str, object]:
    modelled = "token_seconds tokens_per_second prefill_seconds needed_bytes usd_per_million_tokens"
    return {"layout": p.name, **picked(p, "batch fits peak_bytes", modelled)}
