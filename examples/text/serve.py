"""Complete text with a language model, token by token against a cache, on simulated TPU cores.

    python examples/text/serve.py                                            # trains a small model first, 300 steps
    python examples/text/transformer.py --folder run                         # or train one by itself, on whatever mesh,
    python examples/text/serve.py --checkpoint run/step_000000300.safetensors --mesh tensor:8 --prompt "def main("
    python examples/text/serve.py --checkpoint model.safetensors --beams 4   # beam search
    python examples/text/serve.py --checkpoint model.safetensors --kernels int8 --cache int8
    python examples/text/serve.py --plan llama2-70b --slice v5e-16           # no numbers: what to serve it with

Prompts of any lengths are completed side by side. Beside the tokens a second here stand those that the slice would
make, modelled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from meshlib.command.scripts import check_least, finish, line, progress
from meshlib.data.samples import load_text, windows

SIZES = {  # layers, d_model, heads of 32, d_ff
    "tiny": (2, 128, 4, 512),
    "small": (2, 256, 8, 1024),
    "base": (6, 512, 16, 2048),
}
PRECISIONS = {"bfloat16": "default", "float32": "highest"}
PROMPTS = ("def ", "import os\n", "class Reader:\n    ")


def trained(args: argparse.Namespace, ready: Callable[[mtf.Simulation], object]) -> str | mtf.Simulation:
    """The model's parameters: those of the checkpoint if there is one, else trained here, and kept there if asked.

    `ready` is called with the parameters before they are trained: what is wrong with other flags shows then.
    """
    if args.checkpoint and Path(args.checkpoint).exists():
        print(f"parameters: {args.checkpoint}")
        return str(args.checkpoint)
    model, mesh = model_of(args), "data:2;tensor:4"
    lr = mtf.optimize.product(
        mtf.optimize.linear_warmup(1.0, min(50, args.steps)),
        mtf.optimize.cosine_decay(2e-3, args.steps, alpha=0.1),
    )
    with mtf.Graph():
        outputs, updates = mtf.models.train_step(
            model, args.batch, args.length, mtf.optimize.AdamWOptimizer(lr), "none", max_norm=1.0
        )
        layout = mtf.models.layout("2d", model, mesh)
        training = mtf.lower(outputs, updates, mesh, layout, precision=PRECISIONS[args.precision])
    sim = mtf.simulate(training, "v3-8", seed=args.seed)
    ready(sim)
    print(f"parameters: trained for {args.steps} steps on mesh {training.mesh}")
    examples = mtf.data.arrays({"windows": windows(load_text(args.text).train, args.length)})
    mtf.train(
        sim,
        examples.shuffle(args.seed).batch(args.batch).map(shifted).repeat(),
        args.steps,
        log_every=20,
        report=lambda row: line(f"step {row['step']:>5}  loss {row['loss']:.4f}"),
    )
    if args.checkpoint:
        mtf.save(sim, args.checkpoint)
    return sim


def model_of(args: argparse.Namespace) -> mtf.models.TransformerConfig:
    """A decoder over bytes: that of `transformer.py`, whose checkpoints can be read."""
    layers, d_model, heads, d_ff = SIZES[args.size]
    return mtf.models.TransformerConfig(
        name=args.size,
        layers=layers,
        d_model=d_model,
        heads=heads,
        head_dim=32,
        d_ff=d_ff,
        vocab=256,
        norm="rms",
        position="rotary",
        numerics=mtf.Numerics(activation_dtype=args.precision),
    )


def shifted(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each byte with the one that follows it."""
    return {"tokens": batch["windows"][:, :-1], "targets": batch["windows"][:, 1:]}


def serve(args: argparse.Namespace) -> None:
    """Complete the prompts, and say how fast."""
    config = model_of(args)
    config = config.replace(numerics=replace(config.numerics, kernel_dtype=args.kernels))
    prompts = args.prompt or list(PROMPTS)
    given = [len(prompt.encode()) for prompt in prompts]
    if not all(given):
        raise mtf.GraphError(f"--prompt {given.index(0) + 1} is empty; give it at least a byte")
    layout = args.layout
    if ":" not in layout and layout:
        layout = mtf.models.layout(layout, config, args.mesh)
    generator_of = partial(
        mtf.Generator,
        config,
        batch=-(-len(prompts) // args.groups) * args.groups,
        length=max(given),
        max_tokens=args.tokens,
        mesh=args.mesh,
        layout=layout,
        slice=args.slice,
        temperature=0.0 if args.beams > 1 else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        beams=args.beams,
        alpha=args.alpha,
        stop=stops(args),
        cache_dtype=args.cache,
        precision=PRECISIONS[args.precision],
        seed=args.seed,
    )
    generator = generator_of(trained(args, lambda sim: generator_of(state=sim)))
    print(f"slice: {generator.sim.slice}; mesh: {generator.decode.mesh}; layout: {generator.decode.layout or '(none)'}")
    begun = time.perf_counter()
    made = generator(prompts, lambda done, most: progress(done, most, "tokens"))
    seconds = time.perf_counter() - begun
    line("")
    for prompt, text, score in zip(prompts, made.texts, made.scores, strict=True):
        print("\n".join(f"    {row}" for row in f"{prompt}|{text}".splitlines()))
        print(f"    (log-probability {score:.1f}{' over the length penalty' if args.beams > 1 else ''})\n")
    slice_ = generator.sim.slice
    assert slice_ is not None
    read, step = (mtf.estimate(program, slice_) for program in (generator.prefill, generator.decode))
    count = sum(max(1, len(tokens)) for tokens in made.tokens)
    print(f"{count / seconds:,.0f} tokens/s here, prefill and all")
    print(
        f"on {slice_.name} (modelled): {generator.batch / step.step_seconds:,.0f} tokens/s, "
        f"a token every {1e6 * step.step_seconds:,.0f} us, prefill {1e6 * read.step_seconds:,.0f} us"
    )
    print(f"memory of a core: {generator.decode.memory.peak_bytes:,} bytes at the peak of a step (exact)")


def stops(args: argparse.Namespace) -> list[str | int]:
    """What ends a completion: a text, or where it is one byte that token, as beam search takes it."""
    try:
        # What Latin-1 lacks becomes an escape itself; of the others each character is one byte, as the decoder wants.
        texts = [stop.encode("latin-1", "backslashreplace").decode("unicode_escape") for stop in args.stop]
    except UnicodeDecodeError as fault:
        raise mtf.GraphError(
            f"--stop {fault.object.decode('latin-1')!r} is not text with escapes: {fault.reason}"
        ) from None
    return [text.encode()[0] if len(text.encode()) == 1 else text for text in texts]


def plan(args: argparse.Namespace) -> None:
    """What a published model would be served with on a slice: batches, layouts, latency, throughput, cost."""
    config = mtf.models.preset(args.plan)
    found = mtf.serving(
        config,
        args.slice,
        context=args.context,
        encoder_length=args.context if config.encoder_decoder else None,
        cache_dtype=args.cache,
        weight_dtype=args.kernels,
    )
    print(found)
    if args.plot:
        found.plot(args.plot)
        print(f"drawn: {args.plot}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", default=None, help="parameters; trained and written there if it does not exist")
    parser.add_argument("--prompt", action="append", default=None, help="text to complete; may be given several times")
    parser.add_argument("--tokens", type=int, default=100, help="bytes to write after each prompt, at most")
    parser.add_argument("--mesh", default="data:1;tensor:8", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="data+tensor+cache", help="a name of mtf.models.LAYOUTS, or dim:axis rules")
    parser.add_argument("--slice", default="v3-8", help="the slice of simulated cores; as many as the mesh has")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest byte")
    parser.add_argument("--top-k", type=int, default=None, help="draw among this many likeliest")
    parser.add_argument("--top-p", type=float, default=None, help="draw among the likeliest that make up this much")
    parser.add_argument("--beams", type=int, default=1, help="beam search with this many hypotheses")
    parser.add_argument("--alpha", type=float, default=0.6, help="of the length penalty of beam search")
    parser.add_argument("--stop", action="append", default=[], help="text that ends a completion, as in '\\n\\n'")
    narrow = ("int8", "float8_e4m3fn", "float8_e5m2")
    parser.add_argument("--kernels", choices=("int4", *narrow), default=None, help="what weights are stored in")
    parser.add_argument("--cache", choices=("bfloat16", *narrow), default=None, help="what caches are stored in")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--steps", type=int, default=300, help="of training, where there is no checkpoint")
    parser.add_argument("--batch", type=int, default=16, help="of training")
    parser.add_argument("--length", type=int, default=128, help="of training")
    parser.add_argument("--text", default=None, help="to train on; default: the standard library's sources")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", default=None, metavar="PRESET", help="only plan how to serve a published model")
    parser.add_argument(
        "--context", type=int, default=4096, help="positions of the caches of --plan, and of an encoder"
    )
    parser.add_argument("--plot", default=None, help="file for the picture of --plan")
    args = parser.parse_args(argv)
    check_least(parser, args, tokens=1, beams=1, steps=1, batch=1, length=2, seed=0, context=1)
    args.groups = dict(mtf.Mesh(args.mesh).sizes_by_axis).get("data", 1)  # the batch is a multiple of it
    return args


def run(argv: Sequence[str] | None) -> None:
    """Plan or serve."""
    args = parse(argv)
    (plan if args.plan else serve)(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the text are wrong."""
    return finish("serve.py", lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main())
