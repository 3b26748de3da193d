"""A trained model as a folder: config, variables, and preprocessing.

    config.json         the config, facts of its input, and the other files with their sizes and CRC-32s
    model.safetensors   its variables, as `mtf.save` writes them; no slots of an optimizer
    tokenizer.json      of a model of text its vocabulary, as `BytePairs.save` writes it

The files change together (`meshlib.core.file_sets`): whoever is killed leaves the old model or the new one. Weights
that `write_weights` wrote into the folder before are replaced.

Nothing in it depends on the mesh, the layout or the devices on which the model was trained. `load_model` needs nothing
but this library and NumPy to predict on one core; a mesh, a layout and JAX's devices are options.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from meshlib.core.arguments import at
from meshlib.core.errors import CheckpointError, GraphError
from meshlib.core.file_sets import FileSet, Member
from meshlib.core.files import make_folder
from meshlib.data.vocabulary import BytePairs
from meshlib.generation.tokens import ByteTokenizer
from meshlib.models.config import TransformerConfig
from meshlib.models.images.resnet import ResNetConfig
from meshlib.models.images.vit import ViTConfig
from meshlib.sharing.config_json import as_json
from meshlib.sharing.manifests import FORMAT, MODEL, OWN_SHARDS, VARIABLES, VERSION, VOCABULARY
from meshlib.sharing.pictures import ImageInput
from meshlib.sharing.programs import Build, Config, forward_program, kind_of, values_of
from meshlib.simulation import Simulation, simulate
from meshlib.storage.checkpoint import write_state

MEMBERS = ("variables", "tokenizer")  # keys of the config that name files
BYTES, OWN_FILE = "bytes", "file"  # values of the config's tokenizer entry


def _record(
    config: Config, tokenizer: BytePairs | ByteTokenizer | None, images: ImageInput | None, what: str
) -> dict[str, Any]:
    """The contents of config.json for a model."""
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    try:
        record["model"] = as_json(config)
    except TypeError as fault:
        raise GraphError(f"{at(what)}: config: {fault}") from None
    if images is not None:
        record["images"] = {n: list(getattr(images, n)) for n in ("mean", "deviation", "classes")}
    if tokenizer is not None:
        record["tokenizer"] = OWN_FILE if isinstance(tokenizer, BytePairs) else BYTES
        record["end"] = tokenizer.end_name if isinstance(tokenizer, BytePairs) else None
    return record


def export(
    trained: object,
    folder: str | os.PathLike[str],
    config: Config,
    *,
    tokenizer: BytePairs | ByteTokenizer | None = None,
    images: ImageInput | None = None,
    build: Build | None = None,
) -> None:
    """Write a trained model to a folder, from which `load_model` loads it anywhere.

    Args:
      trained: a simulation or a run on devices, arrays by name, or the path of a checkpoint.
      folder: created if missing.
      config: a `TransformerConfig`, `ResNetConfig` or `ViTConfig`; or, for a program of your own, the arguments of
        `build`, by name.
      tokenizer: the vocabulary of a text model, at most as large as the model's. If the model's is larger (padded),
        its further tokens are never chosen.
      images: for an image model, the normalisation of its pixels and the names of its classes.
      build: for a program of your own, a function of these arguments that returns its outputs by name.
    Raises: GraphError for arguments that do not fit together, and for missing variables; CheckpointError where the
      folder can't be written.
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
            f"{at(what)}: the tokenizer has {tokenizer.size} tokens, the model {config.vocab}; it is of another model"
        )
    if isinstance(config, ResNetConfig | ViTConfig) and images is not None:
        images.check(config.channels, config.classes, what)
    record = _record(config, tokenizer, images, what)
    program = forward_program(config, build)
    wanted = {name: v.tensor.shape.sizes for name, v in program.variables.items()}
    sim = simulate(program)
    for name, array in values_of(trained, wanted, lambda: program, what).items():
        sim.state[name] = array
    processes = trained.state.processes if isinstance(trained, Simulation) else None
    if processes is not None and not processes.first:
        return
    place = make_folder(folder, what, CheckpointError)
    names = [VARIABLES, VOCABULARY] if isinstance(tokenizer, BytePairs) else [VARIABLES]
    file_set = FileSet(place, MODEL, names, what, CheckpointError, [OWN_SHARDS])

    def manifest(members: Sequence[Member], replaced: Sequence[Member]) -> bytes:
        entries = {kind: m.entry() for kind, m in zip(MEMBERS, members, strict=False)}
        others = {"replaces": [m.entry() for m in replaced]} if replaced else {}
        return json.dumps({**record, "files": entries, **others}, indent=2).encode()

    try:
        with file_set.faults():
            write_state(sim, file_set.file(0))
            if isinstance(tokenizer, BytePairs):
                file_set.file(1).write(tokenizer.as_json())
        file_set.commit(manifest)
    finally:
        file_set.close()


def _check_extras(kind: str, tokenizer: object, images: object, what: str) -> None:
    for name, value, wanted, own in (
        ("tokenizer", tokenizer, BytePairs | ByteTokenizer, "text"),
        ("images", images, ImageInput, "images"),
    ):
        if value is not None and kind != own:
            raise GraphError(f"{at(what)}: {name} is for models of {own}")
        if value is not None and not isinstance(value, wanted):
            raise GraphError(f"{at(what)}: {name} is {type(value).__name__} {value!r:.80}, which can't be written")
