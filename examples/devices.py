"""Where an example runs: on simulated cores, or on the devices that JAX has, in one process or several."""

from __future__ import annotations

import argparse
from functools import lru_cache
from typing import Any

import meshlib as mtf
from hardware import Slice


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say where to run."""
    parser.add_argument("--on", choices=("simulation", "jax"), default="simulation", help="simulated cores, or devices")
    parser.add_argument(
        "--join",
        default=None,
        metavar="ADDRESS,COUNT,INDEX",
        help="with --on jax: one of COUNT processes, the first of which listens at ADDRESS; 'auto' on a TPU pod slice",
    )
    parser.add_argument("--slice", default="v3-8", help="the slice of simulated cores; as many as the mesh has")
    parser.add_argument("--executor", choices=("fast", "exact"), default="fast", help="exact: core by core, slow")


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what makes no sense."""
    if args.join is None:
        return
    address, *counts = args.join.split(",")
    if args.on != "jax":
        parser.error("--join is for --on jax")
    if args.join != "auto" and (len(counts) != 2 or not all(c.isdigit() for c in counts) or ":" not in address):
        parser.error(f"--join takes ADDRESS,COUNT,INDEX, as in 10.0.0.1:8476,2,0, or auto; got {args.join!r}")


def runner(program: mtf.Program, args: argparse.Namespace) -> mtf.Simulation:
    """The program where the flags say: the same face everywhere."""
    if args.on == "simulation":
        return mtf.simulate(program, args.slice, seed=args.seed, executor=args.executor)
    join(args.join)
    run = mtf.on_jax(program, seed=args.seed)
    if run.slice is None:  # devices whose figures nobody has published here
        run.slice = measured(tuple(run.mesh_devices))
    return run


@lru_cache
def measured(devices: tuple[Any, ...]) -> Slice:
    """These devices as a slice of chips, timed once."""
    return Slice(f"measured-{len(devices)}", mtf.measure_chip(devices))


def join(how: str | None) -> None:
    """Become one of several processes, before JAX looks for devices."""
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
