"""The arguments of `meshlib`: one parser per command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from typing import Any, TypeVar

from meshlib.command.argument_parser import Parser
from meshlib.command.choices import ALL_REMAT, OPTIMIZERS, STEP_SETTINGS, TARGETS
from meshlib.core.compiler import COMPILERS, XLA_TPU

Number = TypeVar("Number", int, float)
SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}  # of numbers such as 500B tokens

_PROGRAM = (
    "a model (meshlib models lists them), FILE.py[:function] that returns (outputs, updates), or a JAX function whose "
    "arguments --arg gives, or FUNCTION_arguments beside it (default function: build), a MaxText configuration such as "
    "base.yml, followed by its KEY=VALUE overrides, or a config.json of Hugging Face's"
)


def parser() -> Parser:
    """The parser of all commands."""
    top = Parser(prog="meshlib", description="Plan, prove and price programs on TPU meshes.")
    top.add_argument("--version", action=_Version, help="show program's version number and exit")
    top.set_defaults(run=None)
    under = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    questions = "does it fit, how fast is it, what does it send and cost, and which layout?"
    _plan(_about(under, "plan", questions, "planning:plan"))
    _search(_about(under, "search", "the best mesh and layout of a slice, with a certificate", "planning:search"))
    _report(_about(under, "report", "the plan as one HTML page, with pictures", "planning:report"))
    kept = "write a test for CI: the plan fits, its bytes and dollars keep within a budget"
    _init(_about(under, "init", kept, "initial_check:init"))
    _serve(_about(under, "serve", "batch and layout of decoding: latency, throughput, price", "serving:serve"))
    for name, text, run in (
        ("explain", "what one core runs, and why it sends; or the collectives of step.hlo.txt", "commands:explain"),
        ("estimate", "where time and memory go, operation by operation", "commands:estimated"),
        ("profile", "which share of the step each unit works, and for what", "commands:profiled"),
        ("compare", "the first layout against the others, or what follows each --", "commands:compared"),
        ("check", "all faults of a layout at once", "commands:checked"),
        ("verify", "run the layout on simulated cores and compare with one core", "commands:verified"),
        ("trace", "write the schedule for ui.perfetto.dev", "commands:traced"),
    ):
        command = _about(under, name, text, run, a_slice=name in ("estimate", "profile", "compare", "trace"))
        _layout(command)
        if name == "estimate":
            command.add_argument("--rows", type=_rows, default=25, help="rows shown (%(default)s); 0: all")
        if name == "check":
            _compile(command)
        if name == "compare":
            command.usage = f"{command.usage} [-- OPTIONS ...]"
            command.epilog = f"{command.epilog} After each --: another model, or options that replace those before it."
        if name == "profile":
            command.add_argument("--rows", type=_rows, default=12, help="rows of each table (%(default)s); 0: all")
            command.add_argument("--plot", help="draw the first layout's into this file, such as profile.png")
        if name == "trace":
            command.add_argument("--out", required=True, help="the file, such as trace.json")
    dims = _about(under, "dims", "the dims of a program, their sizes and where they come from", "commands:dims", False)
    dims.set_defaults(compiler=XLA_TPU.name)
    _validate(_command(under, "validate", "predicted beside published, with errors of rows", "validated:validated"))
    slices = _command(under, "slices", "which slices there are", "tables:slices")
    slices.add_argument("kind", nargs="?", help="a chip, such as v5e; all of them unless given")
    _command(under, "models", "which models there are", "tables:models")
    _records(_command(under, "records", "write records of pictures, a table, IDX files or a text", "recorded:recorded"))
    top.commands = dict(under.choices)
    for command in top.commands.values():
        command.siblings = top.commands
    return top


class _Version(argparse.Action):
    """Prints the version, which is looked up only when asked for because that is slow."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from meshlib.core.version import VERSION

        print(f"meshlib {VERSION}")
        parser.exit()


Under = Any  # `add_subparsers` returns a private type


def _command(under: Under, name: str, text: str, run: str) -> argparse.ArgumentParser:
    """Add a command that is run by `run`, a "module:function" of this package."""

    def answer(args: argparse.Namespace) -> int:  # import only the modules of this command
        module, _, function = run.partition(":")
        return int(getattr(import_module(f"meshlib.command.{module}"), function)(args))

    command: argparse.ArgumentParser = under.add_parser(name, help=text, description=text)
    command.set_defaults(run=answer)
    command.add_argument(
        "--json", action="store_true", help="figures for programs, as the command's page describes them"
    )
    command.add_argument("--quiet", action="store_true", help="no progress, no hints")
    return command


def _about(under: Under, name: str, text: str, run: str, a_slice: bool = True) -> argparse.ArgumentParser:
    """Add a command about a program."""
    command_parser = _command(under, name, text, run)
    command_parser.add_argument("program", help=_PROGRAM)
    command_parser.usage = f"{command_parser.prog} PROGRAM [KEY=VALUE ...] [options]"
    command_parser.epilog = "KEY=VALUE: of a MaxText configuration, as its own command line takes them."
    command_parser.add_argument(
        "--models", metavar="FOLDER", help="of MaxText's model files; default: models beside base.yml"
    )
    command_parser.add_argument(
        "--slice",
        required=a_slice,
        help="the slice, such as v5e-256 or 2*v5p-512; meshlib slices lists them; of plan also several, v5e-64,v6e-16",
    )
    command_parser.add_argument(
        "--batch",
        type=_count,
        help="sequences in a step of a model; default: 4,096 tokens a device, but a sequence each",
    )
    command_parser.add_argument(
        "--length", type=_count, help="tokens in a sequence; default: 8,192, or the model's own limit"
    )
    command_parser.add_argument("--remat", choices=ALL_REMAT, help="what the backward pass of a model recomputes")
    command_parser.add_argument(
        "--arg",
        action="append",
        metavar="NAME=DTYPE[SIZES]",
        help="an array that a JAX function takes: x=f32[256,512,1024], params.w=bf16[512,512]; repeatedly",
    )
    command_parser.add_argument(
        "--names",
        action="append",
        metavar="PATH=NAMES",
        help="names of its axes, for layouts: x='batch length d_model', '*.wq'='d_model (heads head_dim)'; repeatedly",
    )
    command_parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default=OPTIMIZERS[0],
        help="what trains a JAX function whose first result is a number (%(default)s); none: its forward alone",
    )
    if name in ("check", "verify", "dims"):  # the result of none of them depends on a slice
        command_parser.set_defaults(compiler=XLA_TPU.name)
    else:
        _compiler(command_parser)
    command_parser.add_argument(
        "--set",
        action="append",
        metavar="NAME=VALUE",
        help="a field of the model's config, its numerics (precision=int8, ...) or its experts' routing (top_k, ...), "
        f"{', '.join(STEP_SETTINGS)} of its training step, or an argument of the function; repeatedly",
    )
    return command_parser


def _compiler(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compiler",
        choices=[*COMPILERS],
        default=XLA_TPU.name,
        help="what the program is lowered and scheduled for (%(default)s)",
    )


def _layout(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--layout",
        action="append",
        metavar="LAYOUT@MESH",
        help="fsdp+tensor@fsdp:16;tensor:8 for a model, or rules: batch:data@data:8; repeatedly",
    )
    command.add_argument("--mesh", help="the mesh, for layouts without their own")


def _compile(command: argparse.ArgumentParser) -> None:
    command.add_argument("--compile", action="store_true", help="also what the real compiler says (pip install libtpu)")
    command.add_argument("--backend", choices=("tpu", "cpu"), default="tpu", help="the compiler's target (%(default)s)")


def _plan(command: argparse.ArgumentParser) -> None:
    _layout(command)
    _compile(command)
    command.add_argument(
        "--search",
        action="store_true",
        help="search meshes and layouts instead of comparing the usual ones; of a MaxText configuration, tune it",
    )
    command.add_argument("--emit", choices=TARGETS, help="print only a plan, in a form that can be run")
    command.add_argument("--rank", type=_count, default=1, help="which of the ranked plans to print (%(default)s)")
    _run(command)
    _effort(command)


def _report(command: argparse.ArgumentParser) -> None:
    _layout(command)
    _compile(command)
    command.add_argument("--search", action="store_true", help="search meshes and layouts, not only the usual ones")
    command.add_argument("--out", required=True, help="the file to write, such as plan.html")
    _run(command)
    _effort(command)


def _init(command: argparse.ArgumentParser) -> None:
    _layout(command)
    command.add_argument("--search", action="store_true", help="search meshes and layouts, not only the usual ones")
    command.add_argument(
        "--out", default="test_plan.py", help="the test to write (%(default)s), its snapshot beside it"
    )
    command.add_argument("--force", action="store_true", help="overwrite an existing test")
    _run(command)
    _effort(command)


def _serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("--context", type=_count, help="positions that caches hold; 2,048, or the model's own limit")
    command.add_argument("--prompt", type=_count, help="tokens that a prefill reads; half the context unless given")
    command.add_argument(
        "--within", type=_amount, help="milliseconds that a token may take; the best throughput within them"
    )
    command.add_argument(
        "--weights", help="dtype of weights: bfloat16, int8, int4, ...; that of the model unless given"
    )
    command.add_argument("--caches", help="dtype of caches, such as int8")
    command.add_argument("--plot", help="draw throughput over latency into this file, such as serving.png")
    load = command.add_argument_group("a load, under which each layout is simulated")
    load.add_argument("--rate", type=_amount, help="requests a second, which arrive at random")
    load.add_argument("--trace", help="file of requests: seconds, prompt tokens, output tokens; in place of --rate")
    load.add_argument(
        "--prompts", help="tokens of prompts: 512, 100-2000 (all alike), 200~1500 (median, 99th percentile)"
    )
    load.add_argument("--outputs", help="tokens that requests ask for, in the form of --prompts")
    load.add_argument("--requests", type=_count, help="how many are simulated; 1,000 unless given")
    load.add_argument("--chunk", type=_count, help="tokens of a prompt that are read before running sequences continue")
    load.add_argument("--separate", action="store_true", help="read prompts on a slice of their own")
    load.add_argument("--first-token", type=_amount, help="milliseconds in which 99 %% have their first token")


def _run(command: argparse.ArgumentParser) -> None:
    how_long = command.add_mutually_exclusive_group()
    how_long.add_argument("--tokens", type=_amount, help="also the cost of a run of this many tokens, such as 1e12")
    how_long.add_argument("--epochs", type=_amount, help="the same for this many epochs of --examples")
    how_long.add_argument("--steps", type=_count, help="the same for this many steps")
    command.add_argument("--examples", type=_count, help="examples of an epoch")
    command.add_argument("--evaluate-every", type=_count, help="steps between evaluations; one at the end unless given")
    command.add_argument("--evaluation-examples", type=_count, help="sequences that an evaluation of a model reads")
    command.add_argument("--input-rate", type=_amount, help="examples that one host prepares in a second")


def _search(command: argparse.ArgumentParser) -> None:
    _layout(command)
    command.add_argument("--objective", default="step_seconds", help="step_seconds, usd, memory, or another figure")
    command.add_argument("--fix", default="", help="rules that every layout has, such as batch:data")
    command.add_argument("--sizes", default="", help="sizes of their axes, such as data:16")
    command.add_argument("--forbid", default="", help="dims that are not split")
    command.add_argument("--axes", type=_count, default=3, help="axes at most (%(default)s)")
    command.add_argument("--resume", help="a file of estimates, which is continued and extended")
    _effort(command)


def _effort(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--try",
        dest="tried",
        action="append",
        metavar="NAME=VALUE,VALUE",
        help="values to search: batch=64,128 or stages=1,4 and microbatches=1,16 of a model, arguments of a function; "
        "repeatedly",
    )
    command.add_argument("--seconds", type=_amount, default=60.0, help="time limit of the search (%(default)s)")
    command.add_argument("--workers", type=_count, help="processes; one for each core unless given")


def _validate(command: argparse.ArgumentParser) -> None:
    command.add_argument("--file", help="JSON in the format of published results; default: the set in the package")
    command.add_argument("--held-out", action="store_true", help="published runs that no constant was fitted to")
    command.add_argument("--refit", action="store_true", help="fit the constants to the training runs first")
    command.add_argument("--talks", action="store_true", help="the figures of the talks, in place of the rows")
    command.add_argument(
        "--machine", action="store_true", help="figures of chips, pods and networks, in place of the rows"
    )
    command.add_argument("--served", action="store_true", help="throughputs of servers, in place of the rows")
    _compiler(command)


def _records(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", help="a folder class/name.png, a .csv with a line of names, an IDX file, or a text")
    command.add_argument("target", help="the file to write, or NAME@COUNT for NAME-00000-of-00010, ...")
    command.add_argument("--labels", help="of an IDX file of images, that of their labels")
    command.add_argument(
        "--column",
        action="append",
        type=_column,
        metavar="NAME:KIND",
        help="of a table: integer, float or text, for a column that is not what it looks; may be repeated",
    )
    command.add_argument("--compression", choices=("gzip", "zlib"), help="of the files; none unless given")


def _column(text: str) -> tuple[str, str]:
    name, _, kind = text.rpartition(":")
    if not name:
        raise argparse.ArgumentTypeError(f"must be NAME:KIND, got {text}")
    return name, kind


def _amount(text: str) -> float:
    return _number(text, float)


def _count(text: str) -> int:
    return _number(text, int)


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 for all of them, got {text!r}")
    return int(text)


def _number(text: str, kind: type[Number]) -> Number:
    size = SUFFIXES.get(text[-1:], 1.0) if kind is float else 1
    try:
        value = kind(text[:-1] if size != 1 else text) * size
    except ValueError:
        value = kind(0)
    if not 0 < value < float("inf"):
        what = "a whole number of at least 1" if kind is int else "a positive number"
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}{_remedy(text, kind)}")
    return value


def _remedy(text: str, kind: type[Number]) -> str:
    """What to write in place of a text that is no positive number."""
    if kind is int:
        return "" if text.lstrip("-").isdecimal() else "; write 8 or 8192"
    number = re.match(r"[\d.]+(?=(ms|s|sec|m|min|h)$)", text)
    return f"; write {number[0]}, without a unit" if number else "; write 20, 1e9 or 1B"
