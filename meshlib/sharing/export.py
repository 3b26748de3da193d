"""A trained model in one folder: what it is, its variables, and how raw input becomes what it reads.

    config.json         the config, and facts of its input
    model.safetensors   its variables, as `mtf.save` writes them; no slots of an optimizer
    tokenizer.json      of a model of text its vocabulary, as `BytePairs.save` writes it

Nothing in it depends on the mesh, the layout or the devices on which the model was trained. `load_model` needs nothing
but this library and NumPy to predict on one core; a mesh, a layout and JAX's devices are options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from layouts import Dimension
from layouts.mesh import MeshLike
from meshlib.checkpoint import load, save
from meshlib.checks import at, whole
from meshlib.errors import CheckpointError, FeedError, GraphError
from meshlib.files import open_file, replace_file
from meshlib.generation.generator import Generator
from meshlib.generation.tokens import ByteTokenizer
from meshlib.graph import Graph
from meshlib.lowering import Program, lower
from meshlib.models.config import TransformerConfig
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.step import ImageConfig, classifier
from meshlib.models.images.tower import BATCH, image_dims
from meshlib.models.images.vit import ViTConfig
from meshlib.models.model import transformer
from meshlib.ops.reduce import softmax
from meshlib.ops.sources import input as given
from meshlib.sharing.configs import as_json, from_json
from meshlib.sharing.pictures import ImageInput, pixels_of
from meshlib.sharing.variables import values_of
from meshlib.simulation import Simulation, simulate
from meshlib.vocabulary import BytePairs

Array = np.ndarray[Any, Any]
Config = TransformerConfig | ImageConfig | Mapping[str, Any]
Build = Callable[..., Any]
Runner = Callable[[Program], Simulation]
FORMAT, VERSION = "meshlib model", 1
CONFIG, VARIABLES, VOCABULARY = "config.json", "model.safetensors", "tokenizer.json"
BYTES = "bytes"


def export(
    trained: object,
    folder: str | os.PathLike[str],
    config: Config,
    *,
    tokenizer: BytePairs | ByteTokenizer | None = None,
    images: ImageInput | None = None,
    build: Build | None = None,
) -> None:
    """Write a trained model into a folder, from which `load_model` reads it anywhere.

    Args:
      trained: a simulation or a run on devices, arrays by name, or the path of a checkpoint.
      folder: is made where it is not there.
      config: a `TransformerConfig`, `ResNetConfig` or `ViTConfig`; or, of a program of your own, the arguments of
        `build`, by name.
      tokenizer: of a model of text, its vocabulary.
      images: of a model of images, how its pixels were normalised, and the names of its classes.
      build: of a program of your own, a function of these arguments that returns its outputs by name.
    Raises: GraphError for what does not go together, and variables that are missing; CheckpointError where the folder
      can't be written.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced().replace(vocab=300)
      >>> with mtf.Graph():
      ...     program = mtf.lower(*mtf.models.train_step(tiny, batch=4, length=8), mesh="data:2", layout="batch:data")
      >>> words = mtf.BytePairs.learn("to be or not to be", 300)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.export(mtf.simulate(program), folder, tiny, tokenizer=words)
      ...     model = mtf.load_model(folder)
      >>> type(model.predict("to be", max_tokens=3))
      <class 'str'>
    """
    what = "export"
    kind = _kind(config, build, what)
    _check_extras(kind, tokenizer, images, what)
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    try:
        record["model"] = as_json(config)
    except TypeError as fault:
        raise GraphError(f"{at(what)}: config: {fault}") from None
    if images is not None:
        record["images"] = {n: list(getattr(images, n)) for n in ("mean", "deviation", "classes")}
    if tokenizer is not None:
        record["tokenizer"] = VOCABULARY if isinstance(tokenizer, BytePairs) else BYTES
    program = _program(config, build)
    wanted = {name: v.tensor.shape.sizes for name, v in program.variables.items()}
    sim = simulate(program)
    for name, array in values_of(trained, wanted, lambda: program, what).items():
        sim.state[name] = array
    processes = trained.state.processes if isinstance(trained, Simulation) else None
    if processes is not None and not processes.first:
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, TypeError, ValueError) as fault:
        raise CheckpointError(f"{what}: no folder {folder!r:.80} can be made: {fault}") from None
    place = Path(folder)
    save(sim, place / VARIABLES)
    if isinstance(tokenizer, BytePairs):
        tokenizer.save(place / VOCABULARY)
    text = json.dumps(record, indent=2)
    replace_file(place / CONFIG, lambda file: file.write(text.encode()), what, CheckpointError)


def load_model(
    folder: str | os.PathLike[str],
    *,
    mesh: MeshLike = "device:1",
    layout: object = "",
    run: Runner | None = None,
    build: Build | None = None,
    batch: int = 1,
) -> Model:
    """A model that `export` wrote, ready to predict.

    Args:
      folder: which `export` wrote.
      mesh, layout: where it runs; one core unless given.
      run: what makes a run of a program in place of `mtf.simulate`, such as `mtf.on_jax` for real devices.
      build: of a program of your own, as of `export`.
      batch: raw inputs that are computed at once, all cores together.
    Returns: a `Model`, whose `predict` takes raw input: a line of text, a file or array of pixels, or feeds by name.
    Raises: CheckpointError for a folder that is none of export's; LayoutError as `mtf.lower`, GraphError for other bad
      arguments.
    """
    what = "load_model"
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(f"{what}: the folder must be text or a pathlib.Path, got {folder!r:.80}")
    place = Path(folder)
    with open_file(place / CONFIG, what, CheckpointError) as (file, target):
        raw = file.read()
    try:
        record = json.loads(raw)
        good = (record["format"], record["version"]) == (FORMAT, VERSION)
    except (ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(f"{what}: {target} was not written by export: {fault!r:.80}") from None
    if not good:
        raise CheckpointError(
            f"{what}: {target} has format {record['format']!r:.40}, version {record['version']!r:.10}; known is "
            f"{FORMAT!r}, version {VERSION}"
        )
    where = f"{what}: {target}"
    config = from_json(record.get("model"), where)
    kind = _kind(config, build, what)
    if whole(batch, what, "batch") < 1:
        raise GraphError(f"{at(what)}: batch must be at least 1, got {batch}")
    vocabulary = record.get("tokenizer")
    tokenizer: BytePairs | ByteTokenizer | None = ByteTokenizer() if vocabulary == BYTES else None
    if vocabulary == VOCABULARY:
        tokenizer = BytePairs.load(place / VOCABULARY)
    seen = record.get("images")
    images = ImageInput(**from_json(seen, where)) if isinstance(seen, dict) else None
    sim = simulate(_program(config, build))
    load(place / VARIABLES, sim)
    common = config, {name: sim.state[name] for name in sim.program.variables}, _Where(mesh, layout, run, int(batch))
    if kind == "text":
        return TextModel(*common, build, tokenizer)
    if kind == "images":
        return ImageModel(*common, build, images or ImageInput())
    return OwnModel(*common, build)


# ------------------------------------------------------------ models


@dataclass(frozen=True)
class _Where:
    """How predictions run."""

    mesh: MeshLike
    layout: object
    run: Runner | None
    batch: int

    def started(self, program: Program, state: Mapping[str, Array]) -> Simulation:
        """A run of a program with these variables."""
        sim = simulate(program) if self.run is None else self.run(program)
        for name in program.variables:
            sim.state[name] = state[name]
        return sim


@dataclass
class Model:
    """A model that was loaded: its config, its variables by name and `predict`. Made by `mtf.load_model`."""

    config: Any
    state: Mapping[str, Array] = field(repr=False)
    where: _Where = field(repr=False)
    build: Build | None = field(repr=False)

    def predict(self, raw: Any, **options: Any) -> Any:
        """What the model makes of raw input."""
        raise NotImplementedError


@dataclass
class TextModel(Model):
    """A Transformer: `predict` completes a text, or of an encoder-decoder gives the text that follows it."""

    tokenizer: BytePairs | ByteTokenizer | None = None
    _ready: dict[object, Generator] = field(default_factory=dict, repr=False)

    def predict(self, raw: Any, **options: Any) -> Any:
        """The completion of a text, or of each of several.

        Args:
          raw: a text, or a list of texts.
          options: max_tokens (64), temperature, top_k, top_p, beams, alpha, stop, seed: as of `mtf.generate`. The end
            of the vocabulary stops a text unless `stop` says otherwise.
        Raises: GraphError for other input, options that do not fit, and a model without a vocabulary.
        """
        what = "predict"
        texts = [raw] if isinstance(raw, str) else raw
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise GraphError(f"{at(what)}: expected a text or a list of texts, got {type(raw).__name__} {raw!r:.80}")
        if self.tokenizer is None:
            raise GraphError(f"{at(what)}: the model was exported without a tokenizer")
        found: list[str] = []
        size = self.where.batch
        lengths = [len(self.tokenizer.encode(text)) for text in texts]
        generator = self._generator(1 << max(3, (max(lengths) - 1).bit_length()), options)
        for first in range(0, len(texts), size):
            found += generator([*texts[first : first + size]]).texts
        return found[0] if isinstance(raw, str) else found

    def _generator(self, length: int, options: Mapping[str, Any]) -> Generator:
        """Programs for texts of up to `length` tokens, made once."""
        key = (length, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in self._ready:
            end = self.tokenizer.specials.get("<end>") if isinstance(self.tokenizer, BytePairs) else None
            stop = {} if end is None or "stop" in options else {"stop": [end]}
            self._ready[key] = Generator(
                self.config,
                self.state,
                self.where.batch,
                length,
                mesh=self.where.mesh,
                layout=self.where.layout,
                run=self.where.run,
                tokenizer=self.tokenizer,
                **{**stop, **options},
            )
        return self._ready[key]


@dataclass
class ImageModel(Model):
    """A classifier of images: `predict` gives the probability of each class."""

    images: ImageInput = field(default_factory=ImageInput)

    def predict(self, raw: Any, **options: Any) -> Any:
        """The probabilities of a picture's classes, the likeliest first; or of each of several pictures.

        Args:
          raw: the path of a file, or an array [height, width, channels] of integers 0 to 255 or floats 0 to 1; or a
            list of these.
        Returns: a dict of class to probability, or a list of them.
        Raises: FeedError for what is no picture; GraphError for options, of which there are none.
        """
        what = "predict"
        if options:
            raise GraphError(f"{at(what)}: a model of images has no option {next(iter(options))!r}")
        c = self.config
        pictures = raw if isinstance(raw, list | tuple) else [raw]
        if not pictures:
            raise FeedError(f"{at(what)}: expected pictures, got none")
        sizes = (c.height, c.width, c.channels)
        made = [self.images.normalised(pixels_of(picture, sizes, at(what))) for picture in pictures]
        found, size = [], self.where.batch
        for first in range(0, len(made), size):
            part = made[first : first + size]
            fed = np.zeros((size, *sizes), np.float32)
            fed[: len(part)] = part
            found += [self._named(row) for row in self._sim.step(images=fed)["probabilities"][: len(part)]]
        return found if isinstance(raw, list | tuple) else found[0]

    def _named(self, row: Array) -> dict[str, float]:
        names = self.images.classes or tuple(map(str, range(len(row))))
        return {names[n]: float(row[n]) for n in np.argsort(-row, kind="stable")}

    @cached_property
    def _sim(self) -> Simulation:
        program = _image_program(self.config, self.where.batch, self.where.mesh, self.where.layout)
        return self.where.started(program, self.state)


@dataclass
class OwnModel(Model):
    """A program of the user's: `predict` takes its inputs by name and gives its outputs."""

    def predict(self, raw: Any, **options: Any) -> Any:
        """The outputs of the program that `build` makes, by name.

        Args:
          raw: its inputs by name.
        Raises: FeedError for inputs that do not fit; GraphError for options, of which there are none.
        """
        if options:
            raise GraphError(f"{at('predict')}: a program of your own has no option {next(iter(options))!r}")
        return self._sim.step(raw)

    @cached_property
    def _sim(self) -> Simulation:
        program = _program(self.config, self.build, self.where.mesh, self.where.layout)
        return self.where.started(program, self.state)


# ------------------------------------------------------------ programs


def _kind(config: object, build: object, what: str) -> str:
    """ "text", "images" or "own"."""
    if isinstance(config, Mapping):
        if not callable(build):
            raise GraphError(
                f"{at(what)}: a config of your own needs build=, a function of {', '.join(config) or 'no arguments'} "
                f"that returns outputs by name, got {build!r:.80}"
            )
        return "own"
    if build is not None:
        raise GraphError(f"{at(what)}: build is for a config of your own; {type(config).__name__} says what it is")
    if isinstance(config, TransformerConfig):
        return "text"
    if isinstance(config, ResNetConfig | ViTConfig):
        return "images"
    raise GraphError(
        f"{at(what)}: config must be a TransformerConfig, ResNetConfig or ViTConfig, or arguments of build by name, "
        f"got {type(config).__name__} {config!r:.80}"
    )


def _check_extras(kind: str, tokenizer: object, images: object, what: str) -> None:
    for name, value, wanted, own in (
        ("tokenizer", tokenizer, BytePairs | ByteTokenizer, "text"),
        ("images", images, ImageInput, "images"),
    ):
        if value is not None and kind != own:
            raise GraphError(f"{at(what)}: {name} is for models of {own}")
        if value is not None and not isinstance(value, wanted):
            raise GraphError(f"{at(what)}: {name} is {type(value).__name__} {value!r:.80}, which can't be written")


def _program(config: Any, build: Build | None, mesh: MeshLike = "device:1", layout: object = "") -> Program:
    """A forward pass, with all that is trained among its variables."""
    if isinstance(config, TransformerConfig):
        plain = config.replace(numerics=replace(config.numerics, kernel_dtype=None))
        with Graph():
            return lower({"loss": transformer(plain, 1, 1, training=False).loss})
    if isinstance(config, Mapping):
        assert build is not None
        with Graph():
            outputs = build(**config)
            if not isinstance(outputs, Mapping):
                raise GraphError(f"{at('build')}: must return outputs by name, got {outputs!r:.80}")
            return lower(outputs, mesh=mesh, layout=layout)
    return _image_program(config, 1, mesh, layout)


def _image_program(config: ImageConfig, batch: int, mesh: MeshLike, layout: object) -> Program:
    with Graph():
        images = given("images", [Dimension(BATCH, batch), *image_dims(config)])
        logits, _ = classifier(config, images, False)
        return lower({"probabilities": softmax(logits, logits.shape.dim("classes"))}, mesh=mesh, layout=layout)
