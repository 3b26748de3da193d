"""Mistakes typed on the command line: each gets one line that says what to do."""

from __future__ import annotations

import pytest

from meshlib.command.choices import COMMAND_FOR
from tests.command.typed import SMALL, run
from tests.effort import each

pytestmark = pytest.mark.usefixtures("folder")

# What is typed, and what the one line says: the name, and what to do.
MISTAKES = {
    "no command": ("", "required: COMMAND"),
    "a command misspelt": ("serch gpt2 --slice v5e-8", "no command 'serch'; did you mean 'search'?"),
    "a command of another tool": ("train gpt2", "no command 'train'"),
    "an option without a command misspelt": ("--verison", "no option --verison; did you mean '--version'?"),
    "an option misspelt": ("plan gpt2 --slce v5e-8", "no option --slce; did you mean '--slice'?"),
    "an option of another command": (
        "plan gpt2 --slice v5e-8 --objective usd",
        "no option --objective; meshlib search takes it",
    ),
    "a setting as an option": (
        "plan gpt2 --slice v5e-8 --precision int8",
        "--precision; write --set precision=",
    ),
    "a field as an option": ("plan gpt2 --slice v5e-8 --d-model 64", "no option --d-model; write --set d_model=..."),
    "tokens in words": ("plan gpt2 --slice v5e-8 --tokens 1X", "got '1X'; write 20, 1e9 or 1B"),
    "an option far from any": ("plan gpt2 --slice v5e-8 --zzz", "no option --zzz"),
    "two programs": ("plan gpt2 palm-540b --slice v5e-8", "unexpected argument 'palm-540b'"),
    "a model misspelt": ("plan lama2-70b --slice v5e-8", "no model 'lama2-70b'; did you mean 'llama2-70b'?"),
    "a model of images misspelt": ("plan resnet50 --slice v5e-8", "did you mean 'resnet-50'?"),
    "a model of a known family": ("plan qwen3-8b --slice v5e-8", "another is a config.json"),
    "an option cut short": ("serve gpt2 --slice v5e-8 --out page.html", "no option --out; did you mean '--outputs'?"),
    "a step too large to verify": (
        "verify gpt2 --set layers=1 --set d_model=64 --set heads=4 --set head_dim=16 --set d_ff=64 --batch 512 --mesh "
        "data:2",
        "flops a step: make it small",
    ),
    "layers without end": ("plan gpt2 --slice v5e-8 --set layers=1_000_000_000", "layers must be at most 100,000"),
    "a dim in two Unicode forms": ("plan net.py --slice v5e-8 --layout bate\u0301:data@data:8", "write 'bat\\xe9'"),
    "a schedule without stages": ("plan gpt2 --slice v5e-8 --set schedule=1f1b", "give its stages, too"),
    "stages that do not divide devices": ("plan gpt2 --slice v5e-8 --set stages=3", "12 microbatches"),
    "a file of another tool": (
        "plan run.sh --slice v5e-8",
        "run.sh is no description of a model that is read: Hugging",
    ),
    "a trainer's YAML": (
        "plan other.yaml --slice v5e-8",
        "no key 'hidden', nor most others here; a YAML file is read as",
    ),
    "a model that is none": ("plan qqqqqq --slice v5e-8", "meshlib models lists them"),
    "a slice misspelt": ("plan gpt2 --slice v5-256", "unknown chip 'v5'; known chips are"),
    "a slice of a wrong size": ("plan gpt2 --slice v5e-7", "v5e-7"),
    "a figure as a command": ("cost gpt2 --slice v5e-8", "no command 'cost'; meshlib plan answers: does it fit"),
    "a budget as an option": (
        "plan gpt2 --slice v5e-8 --budget 100",
        "meshlib init answers: write a test for CI: the plan",
    ),
    "a unit of milliseconds": (
        "serve gpt2 --slice v5e-8 --within 20ms",
        "write 20, without a unit: milliseconds that a token",
    ),
    "minutes of a search": (
        "search gpt2 --slice v5e-8 --seconds 5m",
        "write 5, without a unit: time limit of the search",
    ),
    "an option in capitals": ("plan gpt2 --Slice v5e-8", "did you mean '--slice'?"),
    "two slices without a comma": ("plan gpt2 --slice v5e-8 v5e-16", "joined by commas: --slice v5e-64,v5e-16"),
    "two slices in one word": ("plan gpt2 --slice v5e-8;v5e-16", "joined by commas: v5e-8,v5e-16"),
    "an optimizer as an option": ("plan gpt2 --slice v5e-8 --optimizer sgd", "a model's is --set optimizer=sgd"),
    "a rank of a search": ("plan gpt2 --slice v5e-8 --search --rank 2", "--rank goes with --emit"),
    "a trace as a picture": ("trace gpt2 --slice v5e-8 --layout fsdp@fsdp:8 --out t.png", "t.png must end in .json"),
    "a folder as a program": ("plan folder.py --slice v5e-8", "folder.py is a folder; name a file in it"),
    "an empty config": ("plan empty.json --slice v5e-8", "it is empty"),
    "a command that is a list": ("chips", "meshlib slices answers: which slices there are"),
    "no slice": ("serve gpt2", "required: --slice"),
    "a chip misspelt": ("slices v5x", "no chip 'v5x'; did you mean"),
    "a chip that is none": ("slices h100", "no chip 'h100'; there are"),
    "a setting misspelt": ("plan gpt2 --slice v5e-8 --set layer=3", "layers"),
    "a setting far from any": ("plan gpt2 --slice v5e-8 --set zzz=3", "there are name, layers, d_model, heads"),
    "a setting of a function misspelt": ("plan net.py --slice v5e-8 --set hiden=3", "hiden"),
    "a setting without a value": ("plan gpt2 --slice v5e-8 --set layers", "--set must be NAME=VALUE"),
    "microbatches that do not divide": ("plan gpt2 --slice v5e-8 --set accumulation=3", "32 % 3 = 2"),
    "slots nowhere": ("plan gpt2 --slice v5e-8 --set slots_on_host=2", "slots_on_host must be True or False"),
    "an optimizer misspelt": ("plan gpt2 --slice v5e-8 --set optimizer=adamm", "did you mean 'adam'?"),
    "a training step of images": ("plan resnet-50 --slice v3-8 --set accumulation=2", "no field 'accumulation'"),
    "a setting of images misspelt": ("plan resnet-50 --slice v3-8 --set clases=10", "classes"),
    "remat of images": ("plan resnet-50 --slice v3-8 --remat full", "--remat is for Transformers"),
    "a length of images": ("plan resnet-50 --slice v3-8 --length 8", "--length is for Transformers"),
    "a layout misspelt": ("plan gpt2 --slice v5e-8 --layout fdsp@fsdp:8", "did you mean 'fsdp'"),
    "an option of a command before it": ("--json plan gpt2 --slice v5e-8", "options of a command come after it"),
    "a command for help": ("help plan", "write meshlib COMMAND --help"),
    "a mesh that is a number": ("plan gpt2 --slice v5e-8 --mesh 8", "--mesh: '8' has no ':'; a mesh is AXIS:SIZE"),
    "a layout of nothing": ("plan gpt2 --slice v5e-8 --layout=", "--layout: nothing given; write LAYOUT@MESH"),
    "a setting of another type": (
        "plan gpt2 --slice v5e-8 --set layers=two",
        "TransformerConfig: layers must be an integer, got str 'two'",
    ),
    "a layout misspelt, without a mesh": ("plan gpt2 --slice v5e-8 --layout fsdpp", "did you mean 'fsdp'"),
    "a layout of a function by name": ("explain net.py --layout fsdp@data:8", "give rules, such as batch:data"),
    "a layout of images misspelt": ("plan resnet-18 --slice v3-8 --layout dta@data:8", "did you mean 'data'"),
    "a dim misspelt": ("explain net.py --layout bach:data@data:8", "did you mean 'batch'"),
    "an axis misspelt": ("explain net.py --layout batch:dta@data:8", "dta"),
    "a layout without a mesh": ("plan gpt2 --slice v5e-8 --layout fsdp", "say on which mesh"),
    "no name of a file": ("report gpt2 --slice v5e-8 --out=", "--out is empty; name a file"),
    "a mesh of another size": ("plan gpt2 --slice v5e-8 --layout fsdp@fsdp:4", "4"),
    "a mesh without a layout of a function": ("plan net.py --slice v5e-8 --mesh data:8", "give --layout RULES"),
    "a mesh that no layout takes": ("plan gpt2 --slice v5e-8 --mesh rows:2;cols:4", "without --layout"),
    "a mesh for a search": ("plan gpt2 --slice v5e-8 --search --mesh data:8", "--sizes"),
    "a choice misspelt": ("plan gpt2 --slice v5e-8 --remat fulll", "no choice 'fulll'; did you mean 'full'?"),
    "a compiler misspelt": ("plan gpt2 --slice v5e-8 --compiler xla", "no choice 'xla'"),
    "a batch that is no number": ("plan gpt2 --slice v5e-8 --batch many", "a whole number of at least 1, got 'many'"),
    "a file that is missing": ("plan missing.py --slice v5e-8", "no file missing.py"),
    "a file misspelt": ("plan nett.py --slice v5e-8", "no file nett.py; did you mean 'net.py'?"),
    "the end of a file misspelt": ("plan broken.jsn --slice v5e-8", "did you mean 'broken.json'?"),
    "an option unlike any": ("plan gpt2 --slice v5e-8 --zest 3", "no option --zest\n"),
    "a value of a switch": ("plan gpt2 --slice v5e-8 --json=yes", "--json takes no value, got 'yes': write --json"),
    "an option before the command, misspelt": ("--jsno plan gpt2", "no option --jsno; did you mean '--json'?"),
    "a mesh of another size, without a layout": ("plan gpt2 --slice v5e-8 --mesh data:3", "use data:8"),
    "more than the positions": ("plan gpt2 --slice v5e-8 --length 2048", "or use --set max_length=2048"),
    "no axes": ("search gpt2 --slice v5e-8 --axes 0", "--axes: must be a whole number of at least 1, got '0'"),
    "a config that is missing": ("plan missing.json --slice v5e-8", "missing.json"),
    "a config of another model": ("plan config.json --slice v5e-8", "lama"),
    "a config that is not JSON": ("plan broken.json --slice v5e-8", "broken.json"),
    "a function that is missing": ("plan net.py:bild --slice v5e-8", "no function 'bild'"),
    "a file that is not Python": ("plan bad.py --slice v5e-8", "SyntaxError"),
    "a function that raises": ("plan net.py:unnamed --slice v5e-8", "ValueError: a value of mine (net.py:11)"),
    "a trace below a file": ("trace gpt2 --slice v5e-1 --out net.py/trace.json", "net.py is a file"),
    "a report below a file": ("report gpt2 --slice v5e-1 --out net.py/plan.html", "net.py is a file"),
    "a slice given twice": (
        "plan gpt2 --slice v5e-8 --slice v6e-8",
        "--slice: given twice, 'v5e-8' and 'v6e-8'; a run takes one",
    ),
    "a batch given twice": (
        "plan gpt2 --slice v5e-8 --batch 8 --batch 4",
        "--batch: given twice, 8 and 4; a run takes",
    ),
    "a setting given twice": (
        "plan gpt2 --slice v5e-8 --set layers=2 --set layers=3",
        "layers is given twice, 2 and 3",
    ),
    "an option without its value": ("plan gpt2 --slice", "expected one argument: the slice, such as v5e-256"),
    "a folder without a config": ("plan empty --slice v5e-8", "the folder empty has no config.json"),
    "an array for a model": ("plan gpt2 --slice v5e-8 --arg x=f32[3]", "--arg is for JAX functions"),
    "an optimizer for a model": ("plan gpt2 --slice v5e-8 --optimizer sgd", "--optimizer is for JAX functions"),
    "names for a function": (
        "plan net.py --slice v5e-8 --names x=batch",
        "leave it out for net.py:build, or give them",
    ),
    "model files for a model": ("plan gpt2 --slice v5e-8 --models .", "--models is for MaxText configurations"),
    "rows that are no number": ("estimate gpt2 --slice v5e-8 --rows x", "0 for all of them, got 'x'"),
    "a report that is not a page": ("report gpt2 --slice v5e-1 --out plan.pdf", "must end in .html"),
    "a check that is not Python": ("init gpt2 --slice v5e-1 --out plan.txt", "must end in .py"),
    "values without a search": ("plan gpt2 --slice v5e-8 --try batch=1,2", "--try is for a search; add --search"),
    "a time without a search": ("plan gpt2 --slice v5e-8 --seconds 5", "--seconds is for a search; add --search"),
    "a length for serving": ("serve gpt2 --slice v5e-1 --length 64", "serving has --context and --prompt"),
    "a check that is there": ("init gpt2 --slice v5e-1 --out net.py", "net.py exists already"),
    "serving a model of images": ("serve resnet-50 --slice v3-8", "serve takes a Transformer"),
    "serving too long a context": ("serve gpt2 --slice v5e-1 --context 4096", "1024"),
    "a plot of another kind": (f"serve gpt2 --slice v5e-1 --context 64 --batch 1 {SMALL} --plot a.nope", "a.nope"),
    "a mesh of another size than the slice's": ("check gpt2 --slice v5e-4 --layout fsdp@fsdp:8", "use fsdp:4"),
    "a listing on another slice": ("explain gpt2 --slice v5e-8 --layout fsdp@fsdp:16", "use fsdp:8"),
    "a mesh of a search": ("search net.py --slice v5e-8 --mesh data:8", "meshlib search --sizes"),
    "a rank of no target": ("plan gpt2 --slice v5e-8 --rank 2", "--rank goes with --emit"),
    "a backend of no compiler": ("plan gpt2 --slice v5e-8 --backend cpu", "--backend goes with --compile"),
    "an option as a setting": ("plan gpt2 --slice v5e-8 --set remat=full", "as an option, --remat full"),
    "a batch as a setting": ("plan gpt2 --slice v5e-8 --set batch=8", "as an option, --batch 8"),
    "a chip in other letters": ("slices V5E", "no chip 'V5E'; did you mean 'v5e'?"),
    "a model by its public name": ("plan meta-llama/Meta-Llama-3-8B --slice v5e-8", "did you mean 'llama3-8b'?"),
    "a model without its size": ("dims mixtral", "did you mean 'mixtral-8x7b'?"),
    "serving an encoder": ("serve bert-base --slice v5e-1", "serve takes decoders, and bert-base is an encoder"),
    "serving an encoder-decoder": ("serve t5-small --slice v5e-4 --context 64", "t5-small is an encoder-decoder"),
    "a dim that is none": ("explain net.py --layout zzz:data@data:8", "there are batch, k, hidden"),
    "a compiled program that is missing": ("explain step.hlo.txt --slice v5e-8", "no file step.hlo.txt; name"),
    "a layout that does not divide": (
        "explain gpt2 --set d_ff=3070 --layout tensor@tensor:16",
        "use --set d_ff=3072",
    ),
    "a report on two slices": ("report gpt2 --slice v5e-8,v6e-8 --out a.html", "only meshlib plan takes several"),
    "a report without an end": ("report gpt2 --slice v5e-8 --out plan", "name it plan.html"),
    "a check in no file": ("init gpt2 --slice v5e-8 --out tests", "name it tests.py"),
    "one layout beside none": ("compare net.py --slice v5e-8 --layout batch:a@a:8", "at least two --layout"),
    "a load without its rate": ("serve gpt2 --slice v5e-8 --prompts 20 --outputs 10", "give --rate or --trace"),
    "a load in words": ("serve gpt2 --slice v5e-8 --rate 20 --prompts x --outputs 20", '"100-2000" (all alike)'),
    "a trace into a folder": ("trace net.py --slice v5e-8 --layout batch:a@a:8 --out .", ". is a folder; name a file"),
    "a size with a point": ("dims net.py --set hidden=1.5", "the size must be an integer, not 1.5"),
    "a size below one": ("dims net.py --set hidden=-5", "the size must be at least 1, not -5"),
    "a layout in other signs": ("explain gpt2 --layout fsdp@fsdp=8", "a mesh is AXIS:SIZE"),
    "a dim on two axes": ("explain net.py --layout batch:a;batch:b@a:4;b:2", "join their axes with '+'"),
    "a slice with a comma": ("plan gpt2 --slice v5e-8,v5e-9", "the nearest are v5e-4, v5e-8, v5e-16"),
    "no slices": ("plan gpt2 --slice 0*v5e-8", "the number of slices must be at least 1, not 0"),
    "a run of two lengths": ("plan gpt2 --slice v5e-8 --tokens 1e9 --steps 5", "not allowed with argument --tokens"),
    "rows that are none": ("validate --file empty", "empty"),
    "figures of two kinds": ("validate --talks --machine", "leave out --machine"),
    "records of nothing": ("records missing out", "expected a folder or a file, found none at 'missing'"),
    "records in another form": ("records empty out --compression zip", "did you mean 'gzip'?"),
    "a plan for another library": ("plan gpt2 --slice v5e-8 --emit jax", "there are maxtext, flax"),
    "an objective of two": ("search net.py --slice v5e-8 --objective usd,step", "objective must be 'step_seconds'"),
    "a search of no time": ("search net.py --slice v5e-8 --seconds -3", "must be a positive number, got '-3'"),
    "a search continued from code": ("search net.py --slice v5e-8 --resume net.py", "is not a file of estimates"),
    "microbatches of a pipeline": ("plan gpt2 --slice v5e-8 --set stages=4 --set microbatches=3", "use 2 or 4"),
    "a plot without a name": ("profile net.py --slice v5e-8 --layout batch:a@a:8 --plot", "expected one argument"),
    "options of two commands": ("verify net.py --layout batch:a@a:4 --seed 3", "no option --seed"),
    "a latency of nothing": ("serve gpt2 --slice v5e-1 --within 0", "a positive number, got '0'"),
    "sizes with an equals sign": ("search gpt2 --slice v5e-8 --sizes data=8", "--sizes: 'data=8' has no ':'"),
    "sizes of an axis without a rule": (
        "search gpt2 --slice v5e-8 --sizes data:4",
        "no rule of --fix (none) has; add one, such as --fix DIM:data",
    ),
    "a fixed rule with an equals sign": (
        "search gpt2 --slice v5e-8 --fix batch=data",
        "--fix: 'batch=data' has no ':'",
    ),
    "a forbidden dim misspelt": (
        "search net.py --slice v5e-8 --forbid hiden",
        "--forbid has dim 'hiden', which the program does not have; did you mean 'hidden'?",
    ),
    "an objective misspelt": ("search net.py --slice v5e-8 --objective stepseconds", "did you mean 'step_seconds'?"),
    "values tried and given": (
        "search gpt2 --slice v5e-8 --remat full --try remat=none",
        "--try remat: also given by --remat; leave out",
    ),
    "values tried and set": (
        "search net.py --slice v5e-8 --set hidden=64 --try hidden=2,4",
        "--try hidden: also given by --set",
    ),
    "a comma at the end": ("plan gpt2 --slice v5e-16,", "--slice v5e-16,: no slice beside a comma; write NAME,NAME"),
    "slices of another command": (
        "explain gpt2 --slice v5e-8,v5e-16",
        "only meshlib plan takes several slices; name one",
    ),
    "a file without its end": ("plan net --slice v5e-8", "no model 'net'; did you mean 'net.py'?"),
    "a function of a file without its end": ("plan net:build --slice v5e-8", "did you mean 'net.py:build'?"),
    "a layout by its initials": (
        "plan gpt2 --slice v5e-8 --layout dp@data:8",
        "no layout 'dp'; did you mean 'data'?",
    ),
    "a layout of another library": ("plan gpt2 --slice v5e-8 --layout zero3@fsdp:8", "did you mean 'fsdp'?"),
    "layouts joined by a comma": (
        "plan gpt2 --slice v5e-8 --layout fsdp,tensor@fsdp:2;tensor:4",
        "join them by '+': fsdp+tensor",
    ),
    "a mesh in place of a layout": (
        "plan gpt2 --slice v5e-8 --layout fsdp:2;tensor:4",
        "a mesh without a layout; write LAYOUT@MESH",
    ),
    "a batch in powers of ten": ("plan gpt2 --slice v5e-8 --batch 1e3", "got '1e3'; write 8 or 8192"),
    "a length in thousands": ("plan gpt2 --slice v5e-8 --length 8k", "got '8k'; write 8 or 8192"),
    "epochs without examples": (
        "plan gpt2 --slice v5e-8 --epochs 3",
        "--epochs and --examples, the examples of an epoch, go together",
    ),
    "evaluations of no run": (
        "plan gpt2 --slice v5e-8 --evaluation-examples 3",
        "give its length by --tokens, --epochs or --steps",
    ),
    "tokens of a function": ("plan net.py --slice v5e-8 --layout batch:a@a:8 --tokens 1e9", "give steps"),
    "a batch of a function": ("plan net.py --slice v5e-8 --batch 3", "--set batch="),
    "a field of Hugging Face's": ("plan gpt2 --slice v5e-8 --set hidden_size=64", "did you mean 'd_model'?"),
    "heads of Hugging Face's": ("plan gpt2 --slice v5e-8 --set num_attention_heads=8", "did you mean 'heads'?"),
    "a setting of a step misspelt": (
        "plan gpt2 --slice v5e-8 --set gradient_accumulation=2",
        "did you mean 'accumulation'?",
    ),
    "a batch size as a setting": ("plan gpt2 --slice v5e-8 --set batch_size=8", "did you mean 'batch'?"),
    "dtypes as one": (
        "plan gpt2 --slice v5e-8 --set numerics=int8",
        "--set numerics: set its fields, such as --set precision=int8",
    ),
    "a precision misspelt": ("plan gpt2 --slice v5e-8 --set precision=int9", "did you mean 'int8'?"),
    "a bound of gradients below zero": (
        "plan gpt2 --slice v5e-8 --set max_norm=-1",
        "minimize: max_norm must be positive, got -1",
    ),
    "settings joined by a comma": (
        "plan gpt2 --slice v5e-8 --set layers=3,d_model=64",
        "layers must be an integer, got str '3,d_model=64'",
    ),
    "an emitted plan as JSON": ("plan gpt2 --slice v5e-8 --emit maxtext --json", "leave out --json"),
    "two chips": ("slices v5e v6e", "meshlib slices takes KIND"),
    "a program where none goes": ("models gpt2", "meshlib models takes options alone"),
    "a slice for a chip": ("slices v5e-8", "no chip 'v5e-8'; did you mean 'v5e'?"),
    "accumulation for serving": (
        "serve gpt2 --slice v5e-8 --set accumulation=2",
        "--set accumulation is of a training step; leave it out",
    ),
    "weights in no dtype": ("serve gpt2 --slice v5e-1 --weights int7", "--weights must be"),
    "a trace that is missing": ("serve gpt2 --slice v5e-1 --trace none.csv", "'none.csv' can't be read"),
    "a layout of serving": ("serve gpt2 --slice v5e-8 --layout fsdp@fsdp:8", "no option --layout"),
    "a load of part of its options": (
        "serve gpt2 --slice v5e-8 --chunk 10",
        "--chunk needs a load; give --rate or --trace",
    ),
    "a compiler without a slice": ("check gpt2 --layout fsdp@fsdp:8 --compile", "--compile needs --slice, such as"),
    "an axis twice": ("explain net.py --layout batch:a@a:8;a:4", "axis 'a' occurs twice in one mesh"),
    "an axis of no devices": ("explain net.py --layout batch:a@a:0", "size '0' is not an integer >= 1; a mesh is"),
    "a blank axis": ("explain net.py --layout batch:a+@a:8", "axis name '' is not an identifier"),
}


@each("typed, wanted", MISTAKES, parts=2)
def test_a_mistake_gets_one_line_that_says_what_to_do(
    typed: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--plot" in typed:
        pytest.importorskip("matplotlib", reason="a picture needs the extra 'plot'")
    status, out, err = run(typed, capsys)
    assert status == 2, (out, err)
    assert wanted in err, err
    lines = err.splitlines()
    assert lines[0].startswith("meshlib"), err
    assert "Traceback" not in err
    assert len([line for line in lines if line.startswith("usage: ")]) <= 1
    assert not lines[0].startswith("usage"), "the fault comes first"
    assert len(lines[0]) < 400


def test_words_for_what_a_command_answers_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    for word, command in COMMAND_FOR.items():
        status, _, err = run(word, capsys)
        assert status == 2
        assert f"no command '{word}'; meshlib {command} answers: " in err
