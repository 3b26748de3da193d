"""Helpers for training scripts: flags for devices, progress lines, and an exit status with one clear message.

The examples are written with it; so may be scripts of your own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from hardware import Slice
from meshlib import jax as devices
from meshlib.command.terminal import ended, progress_ends
from meshlib.command.terminal import progress as progress
from meshlib.program.records import Program
from meshlib.simulation import simulate


def line(text: str) -> None:
    """Print a line in place of the progress bar."""
    progress_ends()
    print(text, flush=True)


class Lines:
    """A line for each evaluation of `mtf.train`: epoch or step, loss, speed, and accuracy."""

    def __init__(self, per_epoch: int) -> None:
        self.per_epoch = per_epoch
        self.row: dict[str, Any] = {}

    def __call__(self, row: dict[str, Any]) -> None:
        """Print one row of the history."""
        if "eval_accuracy" not in row:
            self.row = row
            return
        epoch, rest = divmod(row["step"], self.per_epoch)
        when, rate = f"step {row['step']:>2}" if rest else f"epoch {epoch:>2}", self.row["examples_per_second"]
        line(f"{when}  loss {self.row['loss']:.4f}  test accuracy {row['eval_accuracy']:.2%}  ({rate:,.0f} examples/s)")


def check_least(parser: argparse.ArgumentParser, args: argparse.Namespace, **least: int) -> None:
    """Exit with one clear message if a flag that is given, or has a default, is below its minimum."""
    for name, low in least.items():
        if (value := getattr(args, name)) is not None and value < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}, got {value}")


def counts(text: str) -> list[int]:
    """Flag type: integers of at least 1, separated by commas."""
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, such as 8,16, got {text!r}")
    return numbers


def finish(name: str, run: Callable[[], object]) -> int:
    """Run a script; returns its exit status, with one clear message for wrong flags or data."""

    def status() -> int:
        run()
        return 0

    return ended(name, status)


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select devices."""
    parser.add_argument("--on", choices=("simulation", "jax"), default="simulation", help="simulated cores, or devices")
    parser.add_argument(
        "--join",
        default=None,
        metavar="ADDRESS,COUNT,INDEX",
        help="with --on jax: one of COUNT processes, the first of which listens at ADDRESS; 'auto' on a TPU pod slice",
    )
    parser.add_argument("--slice", default="v3-8", help="the slice of simulated cores; as many as the mesh has")
    parser.add_argument("--executor", choices=("fast", "exact"), default="fast", help="exact: core by core, slow")


def check_device_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse contradictory device flags."""
    if args.join is None:
        return
    address, *counts = args.join.split(",")
    if args.on != "jax":
        parser.error("--join is for --on jax")
    if args.join != "auto" and (len(counts) != 2 or not all(c.isdigit() for c in counts) or ":" not in address):
        parser.error(f"--join takes ADDRESS,COUNT,INDEX, as in 10.0.0.1:8476,2,0, or auto; got {args.join!r}")


def runner(program: Program, args: argparse.Namespace) -> Any:
    """The program on the devices of the flags: a `Simulation`, or an `OnJax`, which has the same interface."""
    if args.on == "simulation":
        return simulate(program, args.slice, seed=args.seed, executor=args.executor)
    join(args.join)
    run = devices.on_jax(program, seed=args.seed)
    if run.slice is None:  # devices without published figures
        run.slice = measured(tuple(run.mesh_devices))
    return run


@lru_cache
def measured(jax_devices: tuple[Any, ...]) -> Slice:
    """The slice of chips measured on these devices, timed once."""
    return Slice(f"measured-{len(jax_devices)}", devices.measure_chip(jax_devices))


def join(how: str | None) -> None:
    """Join several processes, before JAX looks for devices."""
    if how is None:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    if how == "auto":
        jax.distributed.initialize()
    else:
        address, count, index = how.split(",")
        jax.distributed.initialize(address, int(count), int(index))
