"""Plan a training step of a large model whose layers are a pipeline over several slices: what does that buy?

    python examples/plans/plan_pipeline.py                                 # Llama 3.1 70B, 4 stages on 4*v5e-256
    python examples/plans/plan_pipeline.py --model 1t --slice "8*v5p-1024" --microbatches 32,64
    python examples/plans/plan_pipeline.py --repeats 1,2,4 --remat none --schedule
    python examples/plans/plan_pipeline.py --model llama3.1-405b --slice v5p-2048 --stages 16 --kind 1f1b

Each slice holds a stage, unless --stages says otherwise: of the weights only its own, and what goes from slice to slice
is a microbatch at a time. The table sets pipelines beside the same step fully sharded with all slices data-parallel. No
array is made; bytes and flops are counted, times are modelled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from hardware.slices import Slice
from meshlib.command.scripts import check_least, counts, finish
from meshlib.models.layouts import TENSOR, largest_power


@dataclass(frozen=True)
class Plan:
    """One step: the lines of its column, and what to say below the table."""

    name: str
    mesh: str
    lines: dict[str, str]
    remarks: list[str]


# A dense model of a trillion parameters, in the proportions of Llama 3.
TRILLION = mtf.models.preset("llama3.1-405b").replace(
    name="dense-1t", layers=192, d_model=20480, heads=160, kv_heads=16, d_ff=71680
)


def config_of(name: str) -> mtf.models.TransformerConfig:
    """A preset, or the model of a trillion parameters."""
    return TRILLION if name == "1t" else mtf.models.preset(name)


def planned(
    args: argparse.Namespace, config: mtf.models.TransformerConfig, pipeline: mtf.models.Pipeline | None
) -> Plan:
    """Build, lower and estimate one step, as a pipeline or without."""
    begun = time.perf_counter()
    where = Slice(args.slice)
    stages = args.stages or where.slices
    outer_size = where.slices if pipeline is None else stages
    inside = where.devices // outer_size
    tensor = largest_power(inside, config.memory_heads, config.d_ff, config.vocab, most=TENSOR)
    outer = "data" if pipeline is None else "pipe"
    mesh = f"{outer}:{outer_size};fsdp:{inside // tensor};tensor:{tensor}"
    parts = f"{'data' if pipeline is None else 'pipeline'}+fsdp+sequence"
    name = "no pipeline"
    if pipeline is not None:
        name = f"{pipeline.microbatches} microbatches" + (f", {pipeline.repeats}x" if pipeline.repeats > 1 else "")
    lines, remarks = {"mesh": mesh}, []
    try:
        with mtf.Graph():
            step = mtf.models.train_step(config, args.batch, args.length, pipeline=pipeline)
        program = mtf.lower(*step, mesh=mesh, layout=mtf.models.layout(parts, config, mesh))
        est = mtf.estimate(program, where)
        lines |= figures(args, config, est)
        lines["idle in the pipeline*"] = f"{est.bubble_seconds:.2f} s, {est.bubble_share:.0%}"
        dcn = sum(c.count * c.sent_bytes for c in program.collectives if outer in c.axes)
        lines["sent between slices"] = f"{dcn / 2**30:,.1f} GiB"
    except mtf.MeshlibError as fault:
        lines["fits"] = "not possible, see below"
        remarks.append(f"{name}: {fault}")
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
        "fits": "yes" if est.fits else f"NO: {gib(memory.needed_bytes - memory.capacity_bytes)}* too much",
        "a device needs*": f"{gib(memory.needed_bytes)} of {gib(memory.capacity_bytes)}",
        "peak of a device": gib(memory.peak_bytes),
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


# ------------------------------------------------------------ flags


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="llama3.1-70b", help="one of mtf.models.PRESETS, or 1t")
    parser.add_argument("--slice", default="4*v5e-256", help="the slices of TPUs: as many stages")
    parser.add_argument("--batch", type=int, default=1024, help="sequences in one step")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence")
    parser.add_argument("--microbatches", type=counts, default="16,32", help="into how many the batch is cut")
    parser.add_argument("--stages", type=int, default=0, help="into how many the layers are cut; 0: one for each slice")
    parser.add_argument("--kind", default="gpipe", choices=("gpipe", "1f1b", "zb-h1", "zb-h2"), help="the schedule")
    parser.add_argument("--repeats", type=counts, default="1", help="how often each microbatch goes round")
    parser.add_argument("--remat", default="full", help="what a stage keeps of each microbatch: none, full")
    parser.add_argument("--tokens", type=float, default=15e12, help="of a whole training run")
    parser.add_argument("--schedule", action="store_true", help="draw which stage does what when")
    args = parser.parse_args(argv)
    check_least(parser, args, batch=1, length=1, tokens=1, stages=0)
    return args


def plan(args: argparse.Namespace) -> None:
    """Print the plans."""
    config, where = config_of(args.model), Slice(args.slice)
    stages = args.stages or where.slices
    print(f"{config.name}: {config.parameters:,} parameters, {config.layers} layers in {stages} stages\non {where}\n")
    pipelines = [
        mtf.models.Pipeline(stages=stages, microbatches=cut, repeats=again, remat=args.remat, schedule=args.kind)
        for cut in args.microbatches
        for again in args.repeats
    ]
    print(table([planned(args, config, pipeline) for pipeline in (None, *pipelines)]))
    for pipeline in pipelines if args.schedule else ():
        kind = None if args.kind == "gpipe" else args.kind
        print(f"\n{mtf.layers.schedule(stages, pipeline.microbatches, pipeline.repeats, kind)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags are wrong."""
    return finish("plan_pipeline.py", lambda: plan(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
