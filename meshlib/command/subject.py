"""The program of a command: a model by name or a function in a file, built once, lowered under several layouts."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hardware.checks import HardwareError
from hardware.slices import Slice
from layouts import LayoutRules, Mesh
from layouts.errors import LayoutError
from meshlib.command.choices import OPTIMIZERS, STEP_SETTINGS
from meshlib.command.jax_function import arguments_of, builder
from meshlib.command.step_settings import with_flag
from meshlib.core.compiler import COMPILERS, XLA_TPU, Compiler
from meshlib.core.errors import GraphError, MeshlibError, SliceError, nearest
from meshlib.core.graph import Graph, Operation
from meshlib.core.text import counted, wrapped
from meshlib.lowering import Program, Session, lower
from meshlib.models import (
    IMAGE_LAYOUTS,
    IMAGE_PRESETS,
    LAYOUTS,
    PRESETS,
    TransformerConfig,
    image_layout,
    image_preset,
    image_step,
    layout,
    preset,
    transformer,
    usual_layouts,
)
from meshlib.models.layouts import layout_hint
from meshlib.models.train import step_arguments, transformer_builder
from meshlib.optimize import MomentumOptimizer
from meshlib.program.instructions import Loop
from meshlib.searching.bounds.least_memory import LeastMemory
from meshlib.sharing.foreign_keys import FILES

TOKENS_OF_A_DEVICE = 4096
IMAGES_OF_A_DEVICE = 128
LENGTH = 8192
LANES = 128  # of a tile
FUNCTION = "build"
OPTIONS = ("batch", "length", "remat", "compiler")  # of a model, which --set does not set
# Axis names that go together, for a mesh without a layout.
LAYOUTS_OF_MODELS = (
    "fsdp", "data", "tensor", "fsdp+tensor", "fsdp+sequence", "fsdp+context", "fsdp+expert", "data+tensor", "data+fsdp",
    "data+fsdp+tensor", "data+fsdp+sequence", "data+fsdp+context", "fsdp+expert+context",
)  # fmt: skip
LAYOUTS_OF_IMAGES = ("data", "zero1", "data+spatial", "data+channels", "spatial", "channels")


@dataclass(eq=False)
class Subject:
    """A program to lay out: how to build it, and one session per set of build arguments.

    `config`, `image`: the model, a Transformer or one of images; `sizes`: its batch and length; `given_batch`: whether
    the command gave the batch; `settings`: values of --set; `arguments`: arguments of `build`; `compiler`: the compiler
    it is lowered for; `placement`: mesh axis -> the factor of it that joins slices, if given; `notes`: more text for a
    plan.
    """

    name: str
    build: Callable[..., Any]
    arguments: Mapping[str, object]
    config: TransformerConfig | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    compiler: Compiler = XLA_TPU
    placement: Mapping[str, int] | None = None
    notes: str = ""
    image: Any = None
    given_batch: bool = True
    settings: Mapping[str, object] = field(default_factory=dict)
    _sessions: dict[object, Session] = field(default_factory=dict)
    _least_memory: dict[Session, LeastMemory] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        """Tokens per step of a text model."""
        return self.sizes["batch"] * self.sizes["length"] if self.config is not None else None

    @property
    def counted(self) -> tuple[int, str] | None:
        """(count, "tokens" or "images") per step of a model; None for a function."""
        if self.tokens is not None:
            return self.tokens, "tokens"
        return None if self.image is None else (self.sizes["batch"], "images")

    @property
    def batch_text(self) -> str:
        """The examples of a step of a model in words."""
        if self.image is not None:
            return counted(self.sizes["batch"], "image")
        return f"{counted(self.sizes['batch'], 'sequence')} of {counted(self.sizes['length'], 'token')}"

    def slice(self, where: Slice) -> Slice:
        """The slice, with the subject's kernels."""
        return where

    def remedy(self, words: str) -> str:
        """A memory remedy, with the flag that applies it, if any."""
        return words if self.config is None else with_flag(words, self.sizes["batch"], self.step)

    @property
    def step(self) -> Mapping[str, object]:
        """Settings of a model's training step beyond its config; none for a function."""
        return self.arguments if self.config is not None else {}

    def built(self, **choices: object) -> tuple[Any, Sequence[Operation]]:
        """Build the outputs and updates."""
        with _user_errors(self.name):
            asked = self.build(**{**self.arguments, **choices})
        if not isinstance(asked, tuple) or len(asked) != 2:
            raise GraphError(f"{self.name} must return (outputs, updates), as mtf.lower takes them, got {asked!r:.80}")
        return asked

    def session(self, **choices: object) -> Session:
        """The session of the program built with these arguments."""
        key = tuple(choices.items())
        if key not in self._sessions:
            first = next(iter(self._sessions.values()), None)
            with Graph():
                program = self.built(**choices)
            self._sessions[key] = Session(*program) if first is None else first.sibling(*program)
        return self._sessions[key]

    def least_memory(self, under: tuple[str, str] | None = None, **choices: object) -> LeastMemory:
        """Lower bounds of memory of the program built with these arguments; of one layout (name, mesh), with the sizes
        that follow from it."""
        session = self.session(**choices)
        if under is not None:
            session = session.under(Mesh(under[1]), self.rules(*under))
        if session not in self._least_memory:
            outputs, updates = session.asked
            self._least_memory[session] = LeastMemory.of([*outputs.values()], updates)
        return self._least_memory[session]

    def sized(self, **choices: object) -> Subject:
        """The subject with the batch and length of a search's choice, if it chose them."""
        sizes = {name: int(str(choices.get(name, size))) for name, size in self.sizes.items()}
        return replace(self, sizes=sizes)

    def compared(self) -> tuple[Any, Sequence[Operation]]:
        """The program of `verify`: for a model its loss, whose gradients are compared between layouts.

        The first steps of Adam depend on the signs of gradients alone, which rounding decides where gradients vanish.
        """
        if self.config is None:
            return self.session().asked
        with Graph():
            model = transformer(self.config, self.sizes["batch"], self.sizes["length"], training=True)
        return {"loss": model.loss}, []

    def evaluation(self, name: str, mesh: str) -> Program:
        """An evaluation step of a model under a layout: its loss.

        Raises: GraphError for a user's function, which has no known evaluation.
        """
        if self.config is None:
            raise GraphError(f"{self.name}: only models have evaluations; leave out --evaluation-examples")
        with Graph():
            model = transformer(self.config, self.sizes["batch"], self.sizes["length"])
            rules = self.rules(name, mesh)
            return lower({"loss": model.loss}, mesh=mesh, layout=rules, compiler=self.compiler)

    @property
    def layouts(self) -> Collection[str]:
        """Names of its layouts; none for a function."""
        return LAYOUTS if self.config is not None else IMAGE_LAYOUTS if self.image is not None else ()

    def rules(self, name: str, mesh: str) -> LayoutRules:
        """Rules of a layout given as text, or for a model by name."""
        if self.config is None or ":" in name or not name:
            named = self.image is not None and ":" not in name
            return image_layout(name, self.image, mesh) if named else LayoutRules(name)
        return layout(name, self.config, mesh)

    def lowered(
        self, name: str, mesh: str, told: Callable[[Loop], object] | None = None, /, **choices: object
    ) -> Program:
        """The program on a mesh, under a layout; `told` as of `Session.lower`."""
        return self.session(**choices).lower(mesh, self.rules(name, mesh), compiler=self.compiler, told=told)

    def usual(self, devices: int) -> list[tuple[str, str]]:
        """Default layouts: for a model the usual ones."""
        if self.image is not None:
            return [("data", f"data:{devices}")]
        if self.config is None:
            raise GraphError(f"{self.name}: say how it is laid out: --layout RULES@MESH, such as batch:data@data:8")
        pipeline = step_arguments(self.step).get("pipeline")
        if pipeline is None:
            return usual_layouts(self.config, devices, self.sizes["batch"])
        return usual_layouts(self.config, devices, self.sizes["batch"] // pipeline.microbatches or 1, pipeline.stages)


def is_hugging_face(program: str) -> bool:
    """True if a program is a config.json or params.json, or a folder with one."""
    return program.endswith(".json") or any(Path(program, name).is_file() for name in FILES)


def _foreign(program: str) -> tuple[Any, str]:
    """The model of a config.json, of text or images, and its features that are not expressed."""
    from meshlib.sharing.foreign_config import config_notes, read_config
    from meshlib.sharing.foreign_images import image_config_notes, is_of_images, read_image_config

    images = is_of_images(program)
    notes = (image_config_notes if images else config_notes)(program)
    lines = [line for note in notes for line in wrapped(note, "not expressed: ", " ")]
    return (read_image_config if images else read_config)(program), "\n".join(lines)


def slice_of(text: str) -> Slice:
    """The slice of a name."""
    if "," in text:
        raise SliceError(f"--slice {text}: only meshlib plan takes several slices; name one")
    try:
        return Slice(text)
    except HardwareError as fault:
        several = re.split(r"[;\s]+", text.strip())
        hint = f"; meshlib plan takes several slices, joined by commas: {','.join(several)}" if several[1:] else ""
        raise SliceError(f"{fault}{hint}") from None


def subject_of(args: argparse.Namespace, where: Slice | None) -> Subject:
    """The subject that the arguments name; a model's batch follows the slice unless given."""
    given = settings_of(args.set or ())
    if getattr(args, "models", None):
        raise GraphError(f"--models is for MaxText configurations; leave it out for {args.program}")
    if re.search(r"\.py(:|$)", args.program):
        return _from_file(args, given)
    refuse_arguments(args, args.program)
    devices = where.devices if where is not None else _devices_named(args)
    config, notes = _config(args.program)
    if not isinstance(config, TransformerConfig):
        return _of_images(args, config, notes, given, devices)
    for name in OPTIONS:
        if name in given:
            raise GraphError(f"--set {name}={given[name]}: a model takes it as an option, --{name} {given[name]}")
    step = {name: given.pop(name) for name in STEP_SETTINGS if name in given}
    if "numerics" in given:
        raise GraphError("--set numerics: set its fields, such as --set precision=int8 --set slice_dtype=bfloat16")
    for name in given.keys() - vars(config).keys():
        if hint := nearest(name, [*STEP_SETTINGS, *OPTIONS]):
            raise GraphError(f"--set {name}: no setting of this name{hint}")
    if given:
        config = config.replace(**given)
    length = args.length or usual_length(config)
    sizes = {"batch": args.batch or usual_batch(devices, length), "length": length}
    subject = of_model(config, sizes, step, COMPILERS[args.compiler], args.batch is not None)
    return replace(subject, settings=given, notes=notes)


def _devices_named(args: argparse.Namespace) -> int:
    """Devices of the mesh that the arguments give, which the default batch follows; 1 without a mesh."""
    meshes = (
        [args.mesh]
        if getattr(args, "mesh", None)
        else [m for _, m in named_layouts(getattr(args, "layout", None) or (), None)]
    )
    return max((Mesh(mesh).size for mesh in meshes), default=1)


def of_model(
    config: TransformerConfig,
    sizes: Mapping[str, int],
    arguments: Mapping[str, object],
    compiler: Compiler,
    given_batch: bool,
) -> Subject:
    """A training step of a Transformer."""
    build = transformer_builder(config, **sizes)
    return Subject(config.name, build, arguments, config, sizes, compiler, given_batch=given_batch)


def usual_batch(devices: int, length: int) -> int:
    """Default sequences per step, as many for each device: 4,096 tokens, but at least one sequence.

    >>> usual_batch(32, 1024), usual_batch(32, 3000), usual_batch(32, 8192)
    (128, 32, 32)
    """
    return devices * max(1, TOKENS_OF_A_DEVICE // length)


def usual_length(config: TransformerConfig) -> int:
    """Default tokens of a sequence: 8,192, or the positions of the model in whole tiles (OPT has two more).

    >>> [usual_length(preset("llama2-7b").replace(max_length=most)) for most in (2050, 514, 100, None)]
    [2048, 512, 100, 8192]
    """
    most = min(LENGTH, config.max_length or LENGTH)
    return most - most % LANES if most > LANES else most


def _config(name: str) -> tuple[Any, str]:
    """The model of a preset or of a Hugging Face config.json, of text or images, and notes on it."""
    if is_hugging_face(name):
        return _foreign(name)
    if name in IMAGE_PRESETS:
        return image_preset(name), ""
    if name not in PRESETS:
        file, colon, function = name.partition(":")
        if Path(f"{file}.py").is_file():
            raise GraphError(f"no model {name!r}; did you mean '{file}.py{colon}{function}'?")
        if Path(name).is_file():
            raise GraphError(
                f"{name} is no description of a model that is read: Hugging Face's config.json, MaxText's base.yml, "
                "FILE.py[:function]; meshlib models lists presets"
            )
        if beside := nearest_file(name):
            raise GraphError(f"no file {name}{beside}")
        hint = nearest(name.rpartition("/")[2], [*PRESETS, *IMAGE_PRESETS]) or ";"
        if Path(name).is_dir() and name:
            raise GraphError(f"the folder {name} has no config.json; name a file in it, or a model: meshlib models")
        raise GraphError(
            f"no model {name!r}{hint} meshlib models lists them, another is a config.json or FILE.py[:function]"
        )
    return preset(name), ""


def nearest_file(name: str) -> str:
    """The end of an error message with the most similar program beside a missing file, or ""."""
    path = Path(name)
    beside = path.parent.iterdir() if path.suffix and path.parent.is_dir() else ()
    return nearest(name, [str(file) for file in beside if file.suffix in (".json", ".py", ".yml")])


def _of_images(args: argparse.Namespace, config: Any, notes: str, given: Mapping[str, Any], devices: int) -> Subject:
    """A training step of an image model."""
    for flag in ("length", "remat"):
        if getattr(args, flag, None):
            raise GraphError(f"--{flag} is for Transformers; {args.program} is a model of images")
    if given:
        config = config.replace(**given)
    batch = args.batch or IMAGES_OF_A_DEVICE * devices

    def build(**choices: Any) -> Any:
        return image_step(config, choices.get("batch", batch), MomentumOptimizer(0.1))

    compiler = COMPILERS[args.compiler]
    sizes = {"batch": batch}
    return Subject(config.name, build, {}, None, sizes, compiler, notes=notes, image=config, settings=given)


def _from_file(args: argparse.Namespace, given: Mapping[str, object]) -> Subject:
    for flag in ("batch", "length", "remat"):
        if getattr(args, flag, None):
            raise GraphError(f"--{flag} is for models; give what a function takes with --set {flag}=...")
    path, _, name = args.program.partition(".py:")
    file = Path(path if path.endswith(".py") else f"{path}.py")
    function = _function(file, name or FUNCTION)
    shown = f"{file.name}:{name or FUNCTION}"
    arguments = arguments_of(function, args.arg or ())
    if arguments is not None:
        function = builder(function, arguments, args)
        shown += f", {args.optimizer}" if args.optimizer != "none" else ""
    else:
        refuse_arguments(args, shown)
    return Subject(shown, function, given, compiler=COMPILERS[args.compiler], settings=given)


def refuse_arguments(args: argparse.Namespace, shown: str) -> None:
    """Raise GraphError for options that apply to JAX functions alone."""
    for flag in ("arg", "names", "optimizer"):
        if getattr(args, flag, None) not in (None, OPTIMIZERS[0]):
            raise GraphError(
                f"--{flag} is for JAX functions whose arguments are given, such as --arg x=f32[256,512]; leave it out "
                f"for {shown}, or give them"
                + (f"; a model's is --set optimizer={args.optimizer}" if flag == "optimizer" else "")
            )


@contextmanager
def _user_errors(what: str) -> Iterator[None]:
    """Report exceptions of the user's code as one message with its line; the library's own errors pass."""
    try:
        yield
    except (MeshlibError, HardwareError):
        raise
    except (Exception, SystemExit) as fault:
        last = traceback.extract_tb(fault.__traceback__)[-1]
        if last.filename == __file__:  # the function was called with the wrong arguments
            name = what.rpartition(":")[2]
            where = (
                "; give its arguments by their names with --set NAME=VALUE, those of a JAX function with --arg "
                f"NAME=f32[256,512] or as what {name}_arguments() beside it returns"
            )
        else:
            where = "" if isinstance(fault, SyntaxError) else f" ({Path(last.filename).name}:{last.lineno})"
        raise GraphError(f"{what} raised {type(fault).__name__}: {fault}{where}") from fault


def _function(file: Path, name: str) -> Callable[..., Any]:
    """A function of a file, which is executed as a module; exceptions of the user's code pass through."""
    if not file.is_file():
        hint = nearest_file(str(file)) or "; name a model (meshlib models lists them) or FILE.py[:function]"
        raise GraphError(f"{file} is a folder; name a file in it" if file.is_dir() else f"no file {file}{hint}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise GraphError(f"{file} can't be read as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(file.stem, module)
    sys.path.insert(0, str(file.resolve().parent))
    with _user_errors(str(file)):
        spec.loader.exec_module(module)
    value = getattr(module, name, None)
    if not callable(value):
        there = [n for n, f in vars(module).items() if callable(f) and getattr(f, "__module__", "") == file.stem]
        raise GraphError(f"{file} has no function {name!r}; it has {', '.join(there) or 'none'}")
    function: Callable[..., Any] = value
    return function


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise GraphError(f"--set must be NAME=VALUE, such as layers=4, got {text!r}")
    return name.strip(), _literal(value)


def settings_of(texts: Sequence[str]) -> dict[str, object]:
    """The values of each `NAME=VALUE`."""
    settings: dict[str, object] = {}
    for name, value in map(_setting, texts):
        if name in settings:
            raise GraphError(f"--set {name} is given twice, {settings[name]!r} and {value!r}; a run takes one")
        settings[name] = value
    return settings


def _literal(text: str) -> object:
    """A Python literal, otherwise the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def tried_values(texts: Sequence[str]) -> dict[str, list[object]]:
    """The values of each `NAME=VALUE,VALUE`."""
    choices = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.strip().isidentifier() or not all(v.strip() for v in values.split(",")):
            raise GraphError(f"--try must be NAME=VALUE,VALUE, such as batch=64,128, got {text!r}")
        choices[name.strip()] = [_literal(value.strip()) for value in values.split(",")]
    return choices


def _mesh(option: str, text: str) -> Mesh:
    """The mesh that an option gives."""
    try:
        return Mesh(text)
    except LayoutError as fault:
        line = str(fault).splitlines()[0].partition(";")[0]
        raise MeshlibError(f"{option}: {line}; a mesh is AXIS:SIZE;..., such as fsdp:16;tensor:8") from None


def _check_name(text: str, name: str, known: Collection[str] | None) -> None:
    """Refuse names of layouts other than `known`, or if that is None, than those of any model."""
    if known is not None and not known:
        raise MeshlibError(f"--layout {text}: a function has no named layouts; give rules, such as batch:data@data:8")
    for part in (part.strip() for part in name.split("+")):
        names = known or dict.fromkeys([*LAYOUTS, *IMAGE_LAYOUTS])
        if part not in names:
            hint = layout_hint(part, names)
            hint = hint or f"; there are {', '.join(names)}, any joined by '+', and rules such as batch:data"
            raise MeshlibError(f"--layout {text}: no layout {part!r}{hint}")


def completed_layouts(subject: Subject, mesh: str) -> list[tuple[str, str]]:
    """The usual layouts whose axes a mesh has.

    Raises: GraphError for a function, and where no layout takes the mesh.
    """
    _mesh("--mesh", mesh)
    names = LAYOUTS_OF_IMAGES if subject.image is not None else LAYOUTS_OF_MODELS if subject.config is not None else ()
    used, faults = {}, []
    for name in names:
        try:
            used[name] = {axis for rule in subject.rules(name, mesh).rules for axis in rule.axes}
        except LayoutError as fault:
            faults.append(str(fault).splitlines()[0])
    if not used:
        what = "; ".join(faults[:2]) or f"{subject.name} is not a model of the library"
        raise GraphError(f"--mesh {mesh} without --layout: {what}; give --layout RULES")
    complete = [name for name, axes in used.items() if axes.issuperset(Mesh(mesh).axes)]
    return [(name, mesh) for name in complete or used]


def named_layouts(texts: Sequence[str], mesh: str | None, subject: Subject | None = None) -> list[tuple[str, str]]:
    """(layout, mesh) of each `LAYOUT@MESH`, or of layouts on one mesh; with a subject, names are those that it has."""
    layouts = []
    for text in texts:
        name, at, own = text.partition("@")
        if not text.strip():
            raise MeshlibError("--layout: nothing given; write LAYOUT@MESH, such as fsdp@fsdp:16")
        if name.strip() and ":" not in name:
            _check_name(text, name, None if subject is None else subject.layouts)
        if not at and re.fullmatch(r"(\s*\w+\s*:\s*\d+\s*;?)+", text):
            raise MeshlibError(f"--layout {text}: a mesh without a layout; write LAYOUT@MESH, such as fsdp@fsdp:16")
        if not at and mesh is None:
            raise MeshlibError(f"--layout {text}: say on which mesh: LAYOUT@MESH, such as fsdp+tensor@fsdp:16;tensor:8")
        if at and mesh is not None:
            raise MeshlibError(f"--layout {text} has a mesh; leave out --mesh")
        size = _mesh(f"--layout {text}", own.strip()).size if at else _mesh("--mesh", str(mesh)).size
        if at and not name.strip() and size > 1:
            raise MeshlibError(
                f"--layout {text}: no layout before the @, so all devices would do the same; give its name or rules, "
                f"such as fsdp{text.strip()}"
            )
        layouts.append((name.strip(), own.strip() if at else str(mesh)))
    return layouts
