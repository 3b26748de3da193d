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
from pathlib import Path
from typing import Any

from meshlib.checkpoint import save
from meshlib.checks import at
from meshlib.errors import CheckpointError, GraphError
from meshlib.files import replace_file
from meshlib.generation.tokens import ByteTokenizer
from meshlib.models.config import TransformerConfig
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.vit import ViTConfig
from meshlib.sharing.configs import as_json
from meshlib.sharing.pictures import ImageInput
from meshlib.sharing.programs import Build, Config, forward_program, kind_of
from meshlib.sharing.variables import values_of
from meshlib.simulation import Simulation, simulate
from meshlib.vocabulary import BytePairs

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
      tokenizer: of a model of text, its vocabulary: at most as many tokens as the model has. Of fewer, as where the
        model's are padded, the rest is never chosen.
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
    kind = kind_of(config, build, what)
    _check_extras(kind, tokenizer, images, what)
    if isinstance(config, TransformerConfig) and isinstance(tokenizer, BytePairs) and tokenizer.size > config.vocab:
        raise GraphError(
            f"{at(what)}: the tokenizer has {tokenizer.size} tokens, the model {config.vocab}; it is another model's"
        )
    if isinstance(config, ResNetConfig | ViTConfig) and images is not None:
        images.check(config.channels, config.classes, what)
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    try:
        record["model"] = as_json(config)
    except TypeError as fault:
        raise GraphError(f"{at(what)}: config: {fault}") from None
    if images is not None:
        record["images"] = {n: list(getattr(images, n)) for n in ("mean", "deviation", "classes")}
    if tokenizer is not None:
        record["tokenizer"] = VOCABULARY if isinstance(tokenizer, BytePairs) else BYTES
        record["end"] = tokenizer.end_name if isinstance(tokenizer, BytePairs) else None
    program = forward_program(config, build)
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


def _check_extras(kind: str, tokenizer: object, images: object, what: str) -> None:
    for name, value, wanted, own in (
        ("tokenizer", tokenizer, BytePairs | ByteTokenizer, "text"),
        ("images", images, ImageInput, "images"),
    ):
        if value is not None and kind != own:
            raise GraphError(f"{at(what)}: {name} is for models of {own}")
        if value is not None and not isinstance(value, wanted):
            raise GraphError(f"{at(what)}: {name} is {type(value).__name__} {value!r:.80}, which can't be written")
