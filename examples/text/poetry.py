"""Given a line of a poem, the next line: a text-to-text problem, trained on simulated TPU cores.

    python examples/text/poetry.py                                  # Shakespeare and Blake, 2x4 cores of a v3-8
    python examples/text/poetry.py --text poems.txt --vocab 4096    # verses of yours, poems separated by empty lines
    python examples/text/poetry.py --line "The woods are lovely, dark and deep,"
    python examples/text/poetry.py --export model                   # a folder that mtf.load_model reads anywhere

The problem of a talk on training with TPUs: an encoder-decoder Transformer with two layers of 128 and much dropout, as
verses are few. Beside its perplexity on poems that it has not seen stand those of a unigram and of a bigram model of
the same tokens.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

if (ROOT := Path(__file__).resolve().parents[2]).joinpath("meshlib").is_dir():
    sys.path.insert(0, str(ROOT))  # from a checkout, installed or not

import meshlib as mtf
from meshlib.command.scripts import add_device_flags, check_device_flags, check_least, finish, line, runner
from meshlib.data.samples import Verses, load_verses
from meshlib.data.samples.verse_pairs import counted

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
        """Packed: a row has as many pairs as fit."""
        return mtf.text_to_text(self.verses.train, self.words, self.length, self.length)

    @cached_property
    def held_out(self) -> mtf.TextExamples:
        """One pair a row, of any length."""
        most = max(len(self.words.encode(text)) + 1 for pair in self.verses.held_out for text in pair)
        room = max(self.length, -(-most // 8) * 8)
        return mtf.text_to_text(self.verses.held_out, self.words, room, room, packed=False)

    def targets(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """The tokens of the next lines, each with its end."""
        return [[*self.words.encode(target), self.words.end] for _, target in pairs]

    def baselines(self) -> tuple[float, float]:
        """Perplexities of the unigram and of the bigram model on the held-out lines."""
        models = counted(self.targets(self.verses.train), self.words.size)
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


def evaluated(program: mtf.Program, examples: mtf.TextExamples, every: int) -> mtf.Evaluation:
    """The mean loss of a token of lines; rows that pad the last batch do not count."""

    def measure(outputs: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> dict[str, float]:
        tokens = int((batch["segment_ids"] > 0).sum())
        return {"loss": tokens * float(outputs["loss"]), "count": tokens}

    rows = -(-examples.rows // EVALUATED) * EVALUATED
    padded = {name: np.pad(x, ((0, rows - len(x)), (0, 0))) for name, x in examples.arrays.items()}
    return mtf.Evaluation(program=program, data=mtf.data.arrays(padded).batch(EVALUATED), every=every, measure=measure)


def train(args: argparse.Namespace, problem: Problem, sim: mtf.Simulation, held_out: mtf.Evaluation) -> mtf.Trained:
    """The steps that are left, with a line for each row of the history."""

    def report(row: dict[str, Any]) -> None:
        if "eval_loss" in row:
            line(f"step {row['step']:>5}  perplexity of held-out lines {math.exp(row['eval_loss']):8.2f}")
        else:
            rate = row["examples_per_second"]
            line(f"step {row['step']:>5}  perplexity {math.exp(row['loss']):8.2f}  {rate:,.1f} rows/s here")

    rows = mtf.data.arrays(problem.train.arrays).shuffle(seed=args.seed).repeat().batch(args.batch)
    return mtf.train(
        sim, rows, args.steps, evaluation=held_out, folder=args.folder, save_every=args.every if args.folder else None,
        log_every=args.every, report=report,
    )  # fmt: skip


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
    problem = Problem(load_verses(args.text), args.vocab)
    model = config(args, problem.words.size)
    training, evaluation = build(args, problem, model)
    sim = runner(training, args)
    assert sim.slice is not None
    line(f"verses: {problem.verses.source}")
    line(f"vocabulary: {problem.words.size} byte pairs; {problem.train}, of {problem.length} tokens")
    line(f"model: {model.parameters:,} parameters on mesh {training.mesh}, layout {training.layout or '(none)'}")
    for note in training.notes:
        line(f"note: {note}")
    held_out = evaluated(evaluation, problem.held_out, args.every)
    trained = train(args, problem, sim, held_out)
    one, two = problem.baselines()
    held = math.exp(held_out(sim)["loss"])
    line(f"\nperplexity of held-out lines, for each of {problem.words.size} tokens")
    line(f"  unigram {one:8.2f}\n  bigram  {two:8.2f}\n  model   {held:8.2f}")
    complete(args, problem, model, sim)
    if args.curve:
        trained.history.plot(args.curve)
    if args.export:
        mtf.export(sim, args.export, model, tokenizer=problem.words)
        line(f"\n{args.export}: mtf.load_model({args.export!r}).predict('a line', beams={args.beams})")
    est = mtf.estimate(training, sim.slice)
    evaluated_once = mtf.estimate(evaluation, sim.slice)
    whole = est.run(
        args.steps,
        evaluation=evaluated_once,
        evaluation_examples=problem.held_out.rows,
        evaluate_every=args.every,
    )
    line(f"\n{est.profile().table(5)}\n\n{whole}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--text", default=None, help="verses, poems separated by empty lines; default: those of the package"
    )
    parser.add_argument("--vocab", type=int, default=300, help="tokens; 4096 in the talk, for 60,000 lines")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=16, help="rows in one step, all cores together")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate of AdamW")
    parser.add_argument("--mesh", default="rows:2;cols:4", help="axes and sizes of the logical mesh")
    parser.add_argument("--layout", default="batch:rows;heads:cols;d_ff:cols;vocab:cols", help="dim:axis rules")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--folder", default=None, help="of checkpoints and the history; a run continues from them")
    parser.add_argument("--curve", default=None, metavar="PICTURE", help="draw the losses, such as curve.png")
    parser.add_argument("--export", default=None, metavar="FOLDER", help="write the model for mtf.load_model")
    parser.add_argument(
        "--line", action="append", help="a line to continue; may be repeated; default: some held-out lines"
    )
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    add_device_flags(parser)
    args = parser.parse_args(argv)
    check_device_flags(parser, args)
    check_least(parser, args, vocab=258, steps=1, batch=1, every=1, beams=1, seed=0)
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must be in 0 to 1, got {args.dropout}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 2 and one clear message where the flags or the text are wrong."""
    return finish("poetry.py", lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
