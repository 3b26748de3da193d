"""Given a line of a poem, the next line: a text-to-text problem, trained on simulated TPU cores.

    python examples/poetry.py                                  # Shakespeare and Blake, 2x4 cores of a v3-8
    python examples/poetry.py --text poems.txt --vocab 4096    # verses of yours, poems separated by empty lines
    python examples/poetry.py --line "The woods are lovely, dark and deep,"
    python examples/poetry.py --export model                   # a folder that mtf.load_model reads anywhere

The problem of a talk on training with TPUs: an encoder-decoder Transformer with two layers of 128 and much dropout, as
verses are few. Beside its perplexity on poems that it has not seen stand those of a unigram and of a bigram model of
the same tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone, installed or not

import meshlib as mtf
from examples import devices, verse_data
from examples.terminal import check_least, finish, line, progress
from examples.verse_data import Verses

EVALUATED = 16  # lines that are evaluated at once


@dataclass
class Problem:
    """The verses as tokens: a vocabulary learnt from those to train on, and rows of static lengths."""

    verses: Verses
    vocab: int

    @cached_property
    def words(self) -> mtf.BytePairs:
        """The vocabulary."""
        first, last = ([pair[n] for pair in self.verses.train] for n in (0, 1))
        return mtf.BytePairs.learn("\n".join([*first, *last]), self.vocab)

    @cached_property
    def length(self) -> int:
        """Tokens of the longest line, with its end, in whole eights."""
        longest = max(len(self.words.encode(text)) for pair in self.verses.train for text in pair)
        return -(-(longest + 1) // 8) * 8

    @cached_property
    def train(self) -> mtf.TextExamples:
        """Packed: a row holds as many pairs as have room."""
        return mtf.text_to_text(self.verses.train, self.words, self.length, self.length)

    @cached_property
    def held_out(self) -> mtf.TextExamples:
        """One pair a row, of any length."""
        most = max(len(self.words.encode(text)) + 1 for pair in self.verses.held_out for text in pair)
        room = max(self.length, -(-most // 8) * 8)
        return mtf.text_to_text(self.verses.held_out, self.words, room, room, packed=False)

    def targets(self, pairs: Sequence[verse_data.Pair]) -> list[list[int]]:
        """The tokens of the next lines, each with its end."""
        return [[*self.words.encode(target), self.words.end] for _, target in pairs]

    def baselines(self) -> tuple[float, float]:
        """Perplexities of the unigram and of the bigram model on the held-out lines."""
        models = verse_data.counted(self.targets(self.verses.train), self.words.size)
        return models.perplexities(self.targets(self.verses.held_out))


def config(args: argparse.Namespace, vocab: int) -> mtf.models.TransformerConfig:
    """Two layers of 128 each way, as in the talk."""
    return mtf.models.TransformerConfig(
        name="poetry", kind="encoder-decoder", layers=2, encoder_layers=2, d_model=128, heads=4, head_dim=32,
        d_ff=512, vocab=-(-vocab // 8) * 8, activation="relu", norm="rms", position="sinusoidal",
        scale_embedding=True, dropout=args.dropout, numerics=mtf.Numerics(activation_dtype=args.precision),
    )  # fmt: skip


def build(args: argparse.Namespace, problem: Problem, model: mtf.models.TransformerConfig) -> list[mtf.Program]:
    """The training program, and one that evaluates on the same variables."""
    where = {"mesh": args.mesh, "layout": args.layout}
    precision = "highest" if args.precision == "float32" else "default"
    warm = mtf.optimize.linear_warmup(1.0, max(1, min(100, args.steps // 4)))
    rate = mtf.optimize.product(warm, mtf.optimize.cosine_decay(args.lr, args.steps, alpha=0.02))
    size = problem.length
    with mtf.Graph():
        optimizer = mtf.optimize.AdamWOptimizer(rate, weight_decay=0.05)
        outputs, updates = mtf.models.train_step(
            model, args.batch, size, optimizer, "none", max_norm=1.0, encoder_length=size, packed=True
        )
        training = mtf.lower(outputs, updates, precision=precision, **where)
    room = problem.held_out.arrays["tokens"].shape[1]
    with mtf.Graph():
        made = mtf.models.transformer(model, EVALUATED, room, encoder_length=room, packed=True)
        evaluation = mtf.lower({"loss": made.loss}, precision=precision, **where)
    return [training, evaluation]


def perplexity(sim: mtf.Simulation, evaluation: mtf.Program, examples: mtf.TextExamples) -> float:
    """For each token of lines; those that fill the last batch up do not count."""
    total = count = 0.0
    for batch in mtf.Batches(examples.arrays, EVALUATED, remainder="pad", epochs=1):
        counts = batch.pop("mask").astype(np.int32)[:, None]
        fed = {**batch, "segment_ids": batch["segment_ids"] * counts}
        tokens = int((fed["segment_ids"] > 0).sum())
        total += tokens * float(sim.run(evaluation, fed)["loss"])
        count += tokens
    return math.exp(total / count)


def train(args: argparse.Namespace, problem: Problem, sim: mtf.Simulation, evaluation: mtf.Program) -> None:
    """The steps that are left."""
    size = min(args.batch, problem.train.rows)
    batches = mtf.Batches(
        problem.train.arrays, args.batch, shuffle_seed=args.seed, remainder="drop" if size == args.batch else "pad"
    )
    done = int(sim.state["step"])
    batches.seek(*divmod(done, batches.per_epoch))
    begun, losses = time.perf_counter(), []
    for step, batch in enumerate(islice(batches, max(0, args.steps - done)), start=done + 1):
        batch.pop("mask", None)
        losses.append(float(sim.step(batch)["loss"]))
        progress(step, args.steps, f"perplexity {math.exp(losses[-1]):.1f}")
        if step % args.every == 0 or step == args.steps:
            held = perplexity(sim, evaluation, problem.held_out)
            seconds = (time.perf_counter() - begun) / len(losses)
            here = math.exp(np.mean(losses))
            line(f"step {step:>5}  perplexity {here:8.2f}, held out {held:8.2f}  ({seconds:.2f} s a step)")
            if args.checkpoint:
                mtf.save(sim, args.checkpoint)
            begun, losses = time.perf_counter(), []


def complete(
    args: argparse.Namespace, problem: Problem, model: mtf.models.TransformerConfig, sim: mtf.Simulation
) -> None:
    """The next lines of some that the model has not seen, by beam search."""
    lines = (
        args.line or [source for source, _ in problem.verses.held_out[:: max(1, len(problem.verses.held_out) // 4)]][:4]
    )
    made = mtf.generate(
        model,
        lines,
        sim,
        max_tokens=problem.length,
        tokenizer=problem.words,
        beams=args.beams,
        stop=[problem.words.end],
    )
    line(f"\nnext lines, by beam search with {args.beams} beams")
    for source, text in zip(lines, made.texts, strict=True):
        line(f"  {source}\n      {text.strip()}")


def run(args: argparse.Namespace) -> None:
    """What the flags ask for."""
    problem = Problem(verse_data.load(args.text), args.vocab)
    model = config(args, problem.words.size)
    training, evaluation = build(args, problem, model)
    sim = devices.runner(training, args)
    assert sim.slice is not None
    line(f"verses: {problem.verses.source}")
    line(f"vocabulary: {problem.words.size} byte pairs; {problem.train}, of {problem.length} tokens")
    line(f"model: {model.parameters:,} parameters on mesh {training.mesh}, layout {training.layout or '(none)'}")
    for note in training.notes:
        line(f"note: {note}")
    if args.checkpoint and Path(args.checkpoint).exists():
        mtf.load(args.checkpoint, sim)
        line(f"going on from step {int(sim.state['step'])} of {args.checkpoint}")
    train(args, problem, sim, evaluation)
    one, two = problem.baselines()
    held = perplexity(sim, evaluation, problem.held_out)
    line(f"\nperplexity of held-out lines, for each of {problem.words.size} tokens")
    line(f"  unigram {one:8.2f}\n  bigram  {two:8.2f}\n  model   {held:8.2f}")
    complete(args, problem, model, sim)
    if args.export:
        mtf.export(sim, args.export, model, tokenizer=problem.words)
        line(f"\n{args.export}: mtf.load_model({args.export!r}).predict('a line', beams={args.beams})")
    line(f"\n{mtf.estimate(training, sim.slice).profile().table(5)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--text", default=None, help="verses, poems separated by empty lines; those that come along")
    parser.add_argument("--vocab", type=int, default=300, help="tokens; 4096 in the talk, for 60,000 lines")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=16, help="rows in one step, all cores together")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate of AdamW")
    parser.add_argument("--mesh", default="rows:2;cols:4", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="batch:rows;heads:cols;d_ff:cols;vocab:cols", help="dim:axis rules")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--checkpoint", default=None, help="file to go on from, and to write at evaluations")
    parser.add_argument("--export", default=None, metavar="FOLDER", help="write the model for mtf.load_model")
    parser.add_argument("--line", action="append", help="a line to go on from, repeatedly; else some held-out ones")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    devices.add_flags(parser)
    args = parser.parse_args(argv)
    devices.check_flags(parser, args)
    check_least(parser, args, vocab=258, steps=1, batch=1, every=1, beams=1, seed=0)
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be in 0 to 1, got {args.dropout}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the text are wrong."""
    return finish("poetry.py", lambda: run(parse(argv)), (mtf.MeshlibError, verse_data.VerseError))


if __name__ == "__main__":
    sys.exit(main())
