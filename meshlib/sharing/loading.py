"""Loading of exported models on any mesh, on simulated cores or JAX devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from layouts.mesh import MeshLike
from meshlib.core.arguments import at, whole
from meshlib.core.documents import COUNT, RECORD, TEXT, Schema, read_json
from meshlib.core.errors import CheckpointError, FeedError, GraphError
from meshlib.core.file_sets import checked
from meshlib.core.file_versions import at_one_moment
from meshlib.data.vocabulary import BytePairs
from meshlib.generation.generator import Generator, check_options
from meshlib.generation.tokens import ByteTokenizer
from meshlib.lowering import Program
from meshlib.models import TransformerConfig
from meshlib.sharing.config_json import from_json
from meshlib.sharing.exporting import BYTES, MEMBERS, OWN_FILE
from meshlib.sharing.manifests import CONFIG, FORMAT, VERSION, check_holds_model
from meshlib.sharing.pictures import ImageInput, pixels_of
from meshlib.sharing.programs import Build, check_layout, forward_program, image_program, kind_of
from meshlib.simulation import Simulation, simulate
from meshlib.storage.checkpoint import load

Array = np.ndarray[Any, Any]
MAX_TOKENS = 64
Runner = Callable[[Program], Simulation]
# attributes that are fixed once a model is loaded
FIXED = ("config", "state", "batch", "length", "mesh", "layout", "run", "tokenizer")


def load_model(
    folder: str | os.PathLike[str],
    *,
    mesh: MeshLike = "device:1",
    layout: object = "",
    run: Runner | None = None,
    build: Build | None = None,
    batch: int = 1,
) -> Model:
    """Load a model that `export` wrote, ready to predict.

    Args:
      folder: a folder that `export` wrote.
      mesh, layout: by default one core.
      run: function used instead of `mtf.simulate`, such as `mtf.on_jax` for real devices.
      build: for a program of your own, as for `export`.
      batch: raw inputs per step, over all cores.
    Returns: a `Model`, whose `predict` takes raw input: a line of text, a file or array of pixels, or feeds by name.
    Raises: CheckpointError for a folder that `export` did not write; LayoutError as `mtf.lower`; GraphError for other
      bad arguments.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced().replace(vocab=300)
      >>> with mtf.Graph():
      ...     program = mtf.lower(*mtf.models.train_step(tiny, batch=1, length=4))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     words = mtf.BytePairs.learn("to be or not to be", 300)
      ...     mtf.export(mtf.simulate(program, seed=0), folder, tiny, tokenizer=words)
      ...     model = mtf.load_model(folder, mesh="cores:2", layout="heads:cores")
      >>> isinstance(model.predict("to be", max_tokens=2), str)
      True
    """
    what = "load_model"
    if not isinstance(folder, str | os.PathLike):
        raise CheckpointError(f"{what}: the folder must be text or a pathlib.Path, got {folder!r:.80}")
    if run is not None and not callable(run):
        raise GraphError(f"{at(what)}: run must map a program to a run, as mtf.on_jax does, got {run!r:.80}")
    where = _Target(mesh, layout, run, whole(batch, what, "batch", low=1))
    model = at_one_moment(lambda: _read(Path(folder), where, build, what), what, CheckpointError)
    model.prepare()
    return model


def _read(place: Path, runs: _Target, build: Build | None, what: str) -> Model:
    """The model in a folder, not lowered yet."""
    check_holds_model(place, what)
    record, target = read_json(place / CONFIG, what, CheckpointError, "a config that export wrote", RECORDED)
    if (record["format"], record["version"]) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{what}: {target} has format {record['format']!r:.40}, version {record['version']!r:.10}; known is "
            f"{FORMAT!r}, version {VERSION}"
        )
    where = f"{what}: {target}"
    config = from_json(record.get("model"), where)
    kind = kind_of(config, build, what)
    vocabulary = record.get("tokenizer")
    tokenizer: BytePairs | ByteTokenizer | None = ByteTokenizer() if vocabulary == BYTES else None
    wanted = MEMBERS if vocabulary == OWN_FILE else MEMBERS[:1]
    paths = _checked_files(place, record.get("files"), wanted, where)
    if vocabulary == OWN_FILE:
        tokenizer = BytePairs.load(paths["tokenizer"], record.get("end"))
    seen = record.get("images")
    images = ImageInput(**from_json(seen, where)) if isinstance(seen, dict) else None
    _check_size(config, paths["variables"], where)
    sim = simulate(forward_program(config, build))
    load(paths["variables"], sim)
    common = config, {name: sim.state[name] for name in sim.program.variables}, runs
    if kind == "text":
        return TextModel(*common, build, tokenizer)
    if kind == "images":
        return ImageModel(*common, build, images or ImageInput())
    return OwnModel(*common, build)


RECORDED: Schema = {"format": TEXT, "version": COUNT, "files": RECORD}


def _check_size(config: object, path: str, where: str) -> None:
    """Raise CheckpointError, before building anything, for a model with more parameters than its file can hold."""
    if not isinstance(config, TransformerConfig):
        return
    most = 2 * os.path.getsize(path)  # int4: two per byte
    count = (config.layers + config.encoder_layers) * config.d_model  # a quick lower bound: each layer has a norm
    count = count if count > most else config.parameters
    if count > most:
        raise CheckpointError(
            f"{where}: the model has at least {count:,} parameters, but {path} has only {most // 2:,} bytes; the "
            "config is not that of the file"
        )


def _checked_files(folder: Path, entries: object, wanted: Sequence[str], where: str) -> dict[str, str]:
    """Paths of the files that a config names, after checking that each is the one written with the config."""
    if not isinstance(entries, dict) or set(entries) != set(wanted):
        raise CheckpointError(
            f"{where}: 'files' should say which files hold the {' and the '.join(wanted)}, but is {entries!r:.80}"
        )
    return {kind: checked(folder, entry, where, CheckpointError) for kind, entry in entries.items()}


# ------------------------------------------------------------ models


@dataclass(frozen=True)
class _Target:
    """Target of predictions: mesh, layout, executor and batch size."""

    mesh: MeshLike
    layout: object
    run: Runner | None
    batch: int

    def started(self, program: Program, state: Mapping[str, Array]) -> Simulation:
        """A run of a program, with its variables set from `state`."""
        sim = simulate(program) if self.run is None else self.run(program)
        for name in program.variables:
            sim.state[name] = state[name]
        return sim


@dataclass(eq=False)
class Model:
    """A loaded model: its config, its variables by name, and `predict`. Created by `mtf.load_model`.

    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> def build(size):
      ...     return {"y": mtf.input("x", [mtf.Dimension("n", size)]) * mtf.variable("w", [], 2.0)}
      >>> with mtf.Graph():
      ...     program = mtf.lower(build(size=3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.export(mtf.simulate(program), folder, {"size": 3}, build=build)
      ...     model = mtf.load_model(folder, build=build)
      >>> model.config, sorted(model.state)
      ({'size': 3}, ['w'])
    """

    config: Any
    state: Mapping[str, Array] = field(repr=False)
    where: _Target = field(repr=False)
    build: Build | None = field(repr=False)

    def predict(self, raw: Any, **options: Any) -> Any:
        """The model's prediction for raw input."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Check that the model can run on its mesh and layout. Raises: LayoutError."""
        raise NotImplementedError


@dataclass(eq=False)
class TextModel(Model):
    """A Transformer: `predict` completes a text, or for an encoder-decoder returns its output text.

    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced().replace(vocab=300)
      >>> with mtf.Graph():
      ...     program = mtf.lower(*mtf.models.train_step(tiny, batch=1, length=4))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     words = mtf.BytePairs.learn("to be or not to be", 300)
      ...     mtf.export(mtf.simulate(program, seed=0), folder, tiny, tokenizer=words)
      ...     model = mtf.load_model(folder)
      >>> len(model.predict(["to be", "or"], max_tokens=2))
      2
    """

    tokenizer: BytePairs | ByteTokenizer | None = None
    _ready: dict[object, Generator] = field(default_factory=dict, repr=False)

    def predict(self, raw: Any, **options: Any) -> Any:
        """The completion of a text, or of each of several texts.

        Args:
          raw: a text, or a list of texts.
          options: max_tokens (by default 64, within the model's positions), temperature, top_k, top_p, beams, alpha,
            stop, seed and others of `mtf.generate`. By default the vocabulary's end token stops a text.
        Raises: GraphError for other input, options that do not fit, and a model without a vocabulary.
        """
        what = "predict"
        texts = [raw] if isinstance(raw, str) else raw
        if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
            raise GraphError(f"{at(what)}: expected a text or a list of texts, got {type(raw).__name__} {raw!r:.80}")
        if self.tokenizer is None:
            raise GraphError(f"{at(what)}: the model was exported without a tokenizer")
        check_options(options, FIXED, what)
        completions: list[str] = []
        size = self.where.batch
        lengths = [len(self.tokenizer.encode(text)) for text in texts]
        if not min(lengths):
            raise GraphError(f"{at(what)}: text {lengths.index(0)} is empty; there is nothing to complete")
        longest = max(lengths)
        generator = self._generator(*self._length_for(longest, options, what))
        for first in range(0, len(texts), size):
            completions += generator([*texts[first : first + size]]).texts
        return completions[0] if isinstance(raw, str) else completions

    def prepare(self) -> None:
        """As `Model.prepare`."""
        check_layout(self.config, self.where.batch, self.where.mesh, self.where.layout)

    def _length_for(self, tokens: int, options: Mapping[str, Any], what: str) -> tuple[int, dict[str, Any]]:
        """The length to lower for texts of this many tokens, and the options; both within the model's positions."""
        length, limit = 1 << max(3, (tokens - 1).bit_length()), self.config.max_length
        if limit is None or self.config.encoder_decoder:
            return length, dict(options)
        room = limit - tokens
        wanted = whole(options.get("max_tokens", max(1, min(MAX_TOKENS, room))), what, "max_tokens")
        if wanted > room:
            raise GraphError(
                f"{at(what)}: a text of {tokens} tokens and {wanted} more, but {self.config.name} has {limit} positions"
            )
        return min(length, limit - max(wanted, 1)), {**options, "max_tokens": wanted}

    def _generator(self, length: int, options: Mapping[str, Any]) -> Generator:
        """The generator for texts of up to `length` tokens, built once."""
        key = (length, *sorted((name, repr(value)) for name, value in options.items()))
        if key not in self._ready:
            words = self.tokenizer if isinstance(self.tokenizer, BytePairs) else None
            stop = {} if words is None or words.end_name is None or "stop" in options else {"stop": [words.end]}
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


@dataclass(eq=False)
class ImageModel(Model):
    """An image classifier: `predict` returns the probability of each class.

    Example:
      >>> import tempfile
      >>> import numpy as np
      >>> import meshlib as mtf
      >>> sizes = {"height": 8, "width": 8, "patch": 4, "d_model": 8, "d_ff": 16, "heads": 2, "layers": 1}
      >>> tiny = mtf.models.ViTConfig("tiny", **sizes, classes=3)
      >>> with mtf.Graph():
      ...     program = mtf.lower(*mtf.models.image_step(tiny, 2, mtf.optimize.SgdOptimizer(0.1)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.export(mtf.simulate(program, seed=0), folder, tiny, images=mtf.ImageInput(classes=("a", "b", "c")))
      ...     model = mtf.load_model(folder)
      >>> sorted(model.predict(np.zeros((8, 8, 3), np.uint8)))  # class -> probability
      ['a', 'b', 'c']
    """

    images: ImageInput = field(default_factory=ImageInput)

    def predict(self, raw: Any, **options: Any) -> Any:
        """Probabilities of a picture's classes in descending order; for a list of pictures, a list of them.

        Args:
          raw: the path of a file, its bytes, or an array [height, width, channels] of integers 0 to 255 or floats 0 to
            1; or a list of these.
        Returns: a dict of class to probability, or a list of them.
        Raises: FeedError for an invalid picture; GraphError for any option, since there are none.
        """
        what = "predict"
        if options:
            raise GraphError(f"{at(what)}: a model of images has no option {next(iter(options))!r}")
        c = self.config
        pictures = raw if isinstance(raw, list | tuple) else [raw]
        if not pictures:
            raise FeedError(f"{at(what)}: expected pictures, got none")
        sizes = (c.height, c.width, c.channels)
        normalised = [self.images.normalised(pixels_of(picture, sizes, at(what))) for picture in pictures]
        predictions, size = [], self.where.batch
        for first in range(0, len(normalised), size):
            part = normalised[first : first + size]
            fed = np.zeros((size, *sizes), np.float32)
            fed[: len(part)] = part
            predictions += [self._named(row) for row in self._sim.step(images=fed)["probabilities"][: len(part)]]
        return predictions if isinstance(raw, list | tuple) else predictions[0]

    def _named(self, row: Array) -> dict[str, float]:
        names = self.images.classes or tuple(map(str, range(len(row))))
        return {names[n]: float(row[n]) for n in np.argsort(-row, kind="stable")}

    def prepare(self) -> None:
        """As `Model.prepare`."""
        _ = self._sim

    @cached_property
    def _sim(self) -> Simulation:
        program = image_program(self.config, self.where.batch, self.where.mesh, self.where.layout)
        return self.where.started(program, self.state)


@dataclass(eq=False)
class OwnModel(Model):
    """A user's program: `predict` takes its inputs by name and returns its outputs.

    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> def build(size):
      ...     return {"y": mtf.input("x", [mtf.Dimension("n", size)]) * mtf.variable("w", [], 2.0)}
      >>> with mtf.Graph():
      ...     program = mtf.lower(build(size=3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.export(mtf.simulate(program), folder, {"size": 3}, build=build)
      ...     model = mtf.load_model(folder, build=build)
      >>> model.predict({"x": [1.0, 2.0, 3.0]})["y"].tolist()
      [2.0, 4.0, 6.0]
    """

    def predict(self, raw: Any, **options: Any) -> Any:
        """The outputs of the program that `build` returns, by name.

        Args:
          raw: its inputs by name.
        Raises: FeedError for inputs that do not fit; GraphError for any option, since there are none.
        """
        if options:
            raise GraphError(f"{at('predict')}: a program of your own has no option {next(iter(options))!r}")
        return self._sim.step(raw)

    def prepare(self) -> None:
        """As `Model.prepare`."""
        _ = self._sim

    @cached_property
    def _sim(self) -> Simulation:
        program = forward_program(self.config, self.build, self.where.mesh, self.where.layout)
        return self.where.started(program, self.state)
