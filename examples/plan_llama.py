"""Plan a training step of a large language model on a pod: does it fit, what bounds it, how fast is it?

    python examples/plan_llama.py                                        # Llama 3.1 405B on v5p-6144, three layouts
    python examples/plan_llama.py --model llama3.1-70b --slice v5e-256 --batch 128 --remat matmuls
    python examples/plan_llama.py --model deepseek-v3 --slice v5p-2048 --length 4096
    python examples/plan_llama.py --layout "fsdp+sequence@fsdp:384;tensor:8" --layout "fsdp@fsdp:512;data:6"

The step (forward, backward, AdamW) is written once and lowered under each layout; no array is made, so a plan for
thousands of chips takes seconds on a laptop. Bytes and flops are counted, times are modelled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone, installed or not

import meshlib as mtf
from examples.terminal import finish
from hardware.errors import HardwareError
from hardware.slices import Slice

TENSOR = 8  # devices at most over which heads are split, unless you say otherwise: they talk in every block
EXPERTS = 32  # devices at most over which experts are split
TOKENS_OF_A_DEVICE = 4096


@dataclass(frozen=True)
class Plan:
    """One layout of the step: the lines of its column, and what to say below the table."""

    name: str
    mesh: str
    lines: dict[str, str]
    remarks: list[str]


def largest_power(number: int, *others: int, most: int | None = None) -> int:
    """The largest power of two that divides all of the numbers, at most `most`."""
    common = gcd(number, *others)
    power = common & -common
    return power if most is None else min(power, most)


def usual_layouts(config: mtf.models.TransformerConfig, devices: int, batch: int) -> list[tuple[str, str]]:
    """Layouts that people train such models with, and meshes for them: (name, mesh)."""
    kv_heads = config.heads if config.memory_heads == 1 else config.memory_heads
    tensor = largest_power(devices, kv_heads, config.d_ff, config.vocab, most=TENSOR)
    context = devices // gcd(devices, batch)  # devices for each sequence, where there are fewer of these
    usual = [("fsdp", "context", context), ("fsdp", "tensor", tensor), ("fsdp", "sequence", tensor)]
    if config.experts is not None:
        usual[1:] = [("fsdp", "expert", largest_power(devices, config.experts.count, most=EXPERTS))]
    made = []
    for name, axis, size in usual:
        rows = devices // size
        fsdp = largest_power(rows, config.d_model)
        axes = {"data": rows // fsdp, "fsdp": fsdp, "tensor" if axis == "sequence" else axis: size}
        parts = [part for part in ("data", name, axis) if axes["tensor" if part == "sequence" else part] > 1]
        made.append(("+".join(parts) or name, ";".join(f"{a}:{n}" for a, n in axes.items() if n > 1) or "fsdp:1"))
    return list(dict.fromkeys(made))


def planned(args: argparse.Namespace, config: mtf.models.TransformerConfig, name: str, mesh: str) -> Plan:
    """Build, lower and estimate one step."""
    begun = time.perf_counter()
    lines, remarks = {"mesh": mesh}, []
    try:
        with mtf.Graph():
            outputs, updates = mtf.models.train_step(config, args.batch, args.length, remat=args.remat)
            layout = mtf.models.layout(name, config, mesh)
            program = mtf.lower(outputs, updates, mesh=mesh, layout=layout)
        est = mtf.estimate(program, args.slice)
        lines |= figures(args, config, est)
        if not est.fits:
            remarks.append(f"{name} on {mesh} does not fit; largest, and what would help (each alone):")
            remarks += [f"  {found}" for found in (*est.memory.live[:3], *est.memory.remedies[:3])]
    except mtf.MeshlibError as fault:
        lines["fits"] = "not possible, see below"
        remarks.append(f"{name} on {mesh}: {fault}")
    lines["planned in"] = f"{time.perf_counter() - begun:.1f} s"
    return Plan(name, mesh, lines, remarks)


# ------------------------------------------------------------ what is shown


def rounded(number: float) -> str:
    """Three digits and a unit: 405 B."""
    for unit, name in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:.3g}"


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"


def figures(args: argparse.Namespace, config: mtf.models.TransformerConfig, est: mtf.Estimate) -> dict[str, str]:
    """The lines of one column of the table; `*` marks what is modelled."""
    tokens = args.batch * args.length
    memory = est.memory
    bound = sorted(est.bound_seconds.items(), key=lambda item: -item[1])
    shares = [f"{name} {seconds / est.step_seconds:.0%}" for name, seconds in bound[:2] if seconds]
    lines = {
        "fits": "yes" if est.fits else f"NO: {gib(memory.peak_bytes - memory.capacity_bytes)} too much",
        "peak of a device": f"{gib(memory.peak_bytes)} of {gib(memory.capacity_bytes)}",
        "  without padding": gib(memory.exact_peak_bytes),
    }
    lines |= {f"  {kind}": gib(size) for kind, size in memory.by_kind.items() if size >= 2**20}
    if est.program.memory.host_bytes:
        lines["  on its host"] = gib(est.program.memory.host_bytes)
    useful = config.flops_per_token(args.length) * tokens / est.step_seconds
    lines |= {
        "step*": f"{est.step_seconds:.2f} s",
        "bound by*": ", ".join(shares),
        "waits for collectives*": f"{est.exposed_comm_seconds:.2f} s",
        "tokens a second*": rounded(tokens / est.step_seconds),
        "MFU*": f"{useful / est.slice.peak_flops_per_device / est.slice.devices:.1%}",
        "flops executed a device": rounded(est.flops),
        "  of these repeated": f"{1 - est.useful_flops / est.flops:.1%}",
        "sent by a device": gib(est.sent_bytes),
    }
    steps = max(1, round(args.tokens / tokens))
    lines[f"{rounded(args.tokens)} tokens take*"] = f"{steps * est.step_seconds / 86400:,.1f} days"
    if est.slice.usd_per_hour is not None:
        lines["  at the list price*"] = f"${rounded(est.usd(steps))}"
    return lines


def table(plans: Sequence[Plan]) -> str:
    """All plans side by side, then what there is to say about each."""
    order = dict.fromkeys(label for plan in sorted(plans, key=lambda p: -len(p.lines)) for label in plan.lines)
    rows = [["layout", *(plan.name for plan in plans)]]
    rows += [[label, *(plan.lines.get(label, "") for plan in plans)] for label in order]
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    lines.append("* modelled; all others exact")
    for plan in plans:
        lines += ["", *plan.remarks] if plan.remarks else []
    return "\n".join(lines)


def heading(args: argparse.Namespace, config: mtf.models.TransformerConfig, where: Slice) -> str:
    """What is planned, and on what."""
    tokens = args.batch * args.length
    flops = config.flops_per_token(args.length) * tokens
    active = f", of which a token meets {config.active_parameters:,}" if config.experts is not None else ""
    return (
        f"{config.name}: {config.parameters:,} parameters{active}\n"
        f"one step: {args.batch:,} sequences of {args.length:,} tokens ({rounded(tokens)}), forward, backward and "
        f"AdamW, {rounded(flops)} useful flops; rematerialisation: {args.remat}\n"
        f"on {where}; {gib(where.hbm_bytes_per_device)} of HBM each\n"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="llama3.1-405b", help="one of mtf.models.PRESETS")
    parser.add_argument("--slice", default="v5p-6144", help="the slice of TPUs")
    parser.add_argument("--batch", type=int, default=0, help="sequences in one step; 0: about 4096 tokens a device")
    parser.add_argument("--length", type=int, default=8192, help="tokens in a sequence")
    parser.add_argument("--remat", default="full", help="what the backward computes again: none, matmuls, full")
    parser.add_argument("--tokens", type=float, default=15e12, help="of a whole training run")
    parser.add_argument(
        "--layout",
        action="append",
        metavar="NAME@MESH",
        help="a layout and its mesh, repeatedly; unless given, the usual ones. Parts: " + ", ".join(mtf.models.LAYOUTS),
    )
    args = parser.parse_args(argv)
    for name, least in (("batch", 0), ("length", 1), ("tokens", 1)):
        if not least <= getattr(args, name) < inf:
            parser.error(f"--{name} must be a number of at least {least}, got {getattr(args, name)}")
    for text in args.layout or ():
        if text.count("@") != 1:
            parser.error(f"--layout is NAME@MESH, such as fsdp+tensor@fsdp:16;tensor:8, got {text}")
    return args


def plan(args: argparse.Namespace) -> None:
    """Print the plan."""
    config = mtf.models.preset(args.model)
    where = Slice(args.slice)
    args.batch = args.batch or max(1, where.devices * TOKENS_OF_A_DEVICE // args.length)
    print(heading(args, config, where))
    if args.layout:
        wanted = [tuple(text.split("@")) for text in args.layout]
    else:
        wanted = usual_layouts(config, where.devices, args.batch)
    print(table([planned(args, config, name, mesh) for name, mesh in wanted]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags are wrong."""
    return finish("plan_llama.py", lambda: plan(parse(argv)), (mtf.MeshlibError, HardwareError))


if __name__ == "__main__":
    sys.exit(main())
