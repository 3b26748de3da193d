"""Plan a training step of a large model whose layers are a pipeline over several slices: what does that buy?

    python examples/plan_pipeline.py                                 # Llama 3.1 70B, 4 stages on 4*v5e-256
    python examples/plan_pipeline.py --model 1t --slice "8*v5p-1024" --microbatches 32,64
    python examples/plan_pipeline.py --repeats 1,2,4 --remat none --schedule

Each slice holds a stage: of the weights only its own, and what goes from slice to slice is a microbatch at a time. The
table sets pipelines beside the same step fully sharded with all slices data-parallel. No array is made; bytes and
flops are counted, times are modelled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone, installed or not

import meshlib as mtf
from examples.plan_llama import Plan, figures, table
from examples.terminal import check_least, finish
from hardware.errors import HardwareError
from hardware.slices import Slice
from meshlib.models.usual import TENSOR, largest_power

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
    inside = where.devices // where.slices
    tensor = largest_power(inside, config.memory_heads, config.d_ff, config.vocab, most=TENSOR)
    outer = "data" if pipeline is None else "pipe"
    mesh = f"{outer}:{where.slices};fsdp:{inside // tensor};tensor:{tensor}"
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


def counts(text: str) -> list[int]:
    """Numbers of at least 1, joined by commas."""
    numbers = [int(part) if part.isdigit() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected numbers of at least 1, such as 8,16, got {text!r}")
    return numbers


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
    parser.add_argument("--repeats", type=counts, default="1", help="how often each microbatch goes round")
    parser.add_argument("--remat", default="full", help="what a stage keeps of each microbatch: none, full")
    parser.add_argument("--tokens", type=float, default=15e12, help="of a whole training run")
    parser.add_argument("--schedule", action="store_true", help="draw which stage does what when")
    args = parser.parse_args(argv)
    check_least(parser, args, batch=1, length=1, tokens=1)
    return args


def plan(args: argparse.Namespace) -> None:
    """Print the plans."""
    config, where = config_of(args.model), Slice(args.slice)
    stages = where.slices
    print(f"{config.name}: {config.parameters:,} parameters, {config.layers} layers in {stages} stages\non {where}\n")
    pipelines = [
        mtf.models.Pipeline(stages=stages, microbatches=cut, repeats=again, remat=args.remat)
        for cut in args.microbatches
        for again in args.repeats
    ]
    print(table([planned(args, config, pipeline) for pipeline in (None, *pipelines)]))
    for pipeline in pipelines if args.schedule else ():
        print(f"\n{mtf.layers.schedule(stages, pipeline.microbatches, pipeline.repeats)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags are wrong."""
    return finish("plan_pipeline.py", lambda: plan(parse(argv)), (mtf.MeshlibError, HardwareError))


if __name__ == "__main__":
    sys.exit(main())
