"""Weights in files by Hugging Face's names: reading into a model's variables, and writing back.

A model is one file, or several with an index that says which tensor is in which (`model.safetensors.index.json`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import einops
import ml_dtypes
import numpy as np

from meshlib.core.arguments import at, choice, shape_faults, whole
from meshlib.core.documents import RECORD, read_json
from meshlib.core.errors import CheckpointError, GraphError, nearest
from meshlib.core.file_sets import FileSet, Member, checked
from meshlib.core.file_versions import at_one_moment
from meshlib.core.files import make_folder
from meshlib.models.config import TransformerConfig
from meshlib.sharing.foreign_planned import PLANNED, planned_notes
from meshlib.sharing.manifests import CONFIG, INDEX, MODEL, SHARDS, SINGLE, check_holds_weights
from meshlib.sharing.names import Family, NamedVariable, family_of
from meshlib.sharing.programs import variables_of
from meshlib.storage.safetensors import Tensors, write_tensors

Array = np.ndarray[Any, Any]
DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
FLOATS = ("F64", "F32", "F16", "BF16")  # float8 kernels have separate scales


def read_weights(path: str | os.PathLike[str], config: TransformerConfig) -> dict[str, Array]:
    """Read a model's variables from a file by Hugging Face's names (Llama, GPT-2 or T5).

    Args:
      path: a safetensors file, an index of several, or a folder with either.
      config: the model's: a preset, or the result of `read_config` for the folder's config.json.
    Returns: arrays by the library's names in float32, layers stacked: for `sim.state`, `mtf.generate`, `mtf.export`.
    Raises: GraphError for a config of another architecture; CheckpointError with all tensors that are missing, of
      another shape or unknown, and for damaged files.
    Example:
      >>> import meshlib as mtf
      >>> state = mtf.sharing.read_weights("gpt2", mtf.models.preset("gpt2"))  # doctest: +SKIP
      >>> mtf.generate(mtf.models.preset("gpt2"), [[464, 3290]], state).tokens  # doctest: +SKIP
    """
    what = "read_weights"
    family_of(config, what)
    return at_one_moment(lambda: _read(path, config, what), what, CheckpointError)


def _read(path: str | os.PathLike[str], config: TransformerConfig, what: str) -> dict[str, Array]:
    _, family = family_of(config, what)
    files = _Files(path, family.prefix, what)
    _check_loaded(path, what)
    wanted = variables_of(config)
    arrays = {name: np.empty(shape, np.float32) for name, shape in wanted.items()}
    faults, used = [], set()
    for row, name, index, theirs in _places(config, family, wanted):
        used.add(theirs)
        if theirs not in files:
            faults.append(f"'{theirs}' is missing{nearest(theirs, files)}; it is '{name}' here")
            continue
        place = arrays[name] if index is None else arrays[name][index]
        fault = _take(row, files.shape(theirs), place.shape, config) or files.wrong_kind(theirs)
        if fault:
            faults.append(f"'{theirs}' {fault}; it is '{name}' here")
        else:
            place[...] = _ours(row, files[theirs], place.shape, config)
    strange = [n for n in files if n not in used and not any(fnmatchcase(n, spare) for spare in family.spare)]
    faults += [f"'{name}' {list(files.shape(name))} is not a variable of {config.name}" for name in strange]
    if faults:
        raise CheckpointError.listing(f"{what}: {files.target} does not fit {config.name}", faults)
    return arrays


def write_weights(
    state: Mapping[str, Any],
    config: TransformerConfig,
    folder: str | os.PathLike[str],
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> list[str]:
    """Write a model's variables by Hugging Face's names, to one file or to several with an index.

    Earlier files of `write_weights` or `mtf.export` in the folder are replaced.

    Args:
      state: arrays by the library's names, stacked layers or one by one: `sim.state`, or what `read_weights` returns.
      config: of the model.
      folder: for the files; created if missing.
      dtype: "float32", "bfloat16" or "float16".
      shard_bytes: largest size of a file; a larger tensor has a file of its own.
    Returns: the names of the files of tensors.
    Raises: GraphError for other arguments, and variables that are missing or of another shape; CheckpointError where
      a file can't be written.
    Example:
      >>> import tempfile
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("gpt2").reduced()
      >>> with mtf.Graph():
      ...     sim = mtf.simulate(mtf.lower(*mtf.models.train_step(tiny, batch=1, length=4)), seed=0)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     mtf.sharing.write_weights(sim.state, tiny, folder)
      ['model.safetensors']
    """
    what = "write_weights"
    _, family = family_of(config, what)
    stored_dtype = DTYPES[choice(dtype, what, "dtype", tuple(DTYPES))]
    whole(shard_bytes, what, "shard_bytes", low=1)
    if not isinstance(state, Mapping):
        raise GraphError(f"{at(what)}: state must be arrays by name, got {type(state).__name__} {state!r:.80}")
    wanted = variables_of(config, scan=any("/layers/" in f"/{name}" for name in state))
    faults = shape_faults(state, wanted)
    if faults:
        raise GraphError.listing(f"{at(what)}: the state is not that of {config.name}", faults)
    tensors: dict[str, Array] = {}
    fused: dict[str, list[Array]] = {}
    for row, name, index, theirs in _places(config, family, wanted):
        array = np.asarray(state[name] if index is None else state[name][index], np.float32)
        back = _theirs(row, array, config)
        if row.part is None:
            tensors[theirs] = back.astype(stored_dtype)
        else:
            fused.setdefault(theirs, []).append(back)
    for theirs, parts in fused.items():  # q, k and v are concatenated
        tensors[theirs] = np.concatenate(parts, axis=-1).astype(stored_dtype)
    return _written(tensors, make_folder(folder, what, CheckpointError), shard_bytes, what)


def _written(tensors: Mapping[str, Array], folder: str, shard_bytes: int, what: str) -> list[str]:
    shards: list[dict[str, Array]] = [{}]
    for name, array in tensors.items():
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + array.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = array
    count = len(shards)
    names = [(f"model-{n:05}", f"-of-{count:05}.safetensors") for n in range(1, count + 1)]
    names = [("model", ".safetensors")] if count == 1 else names
    file_set = FileSet(folder, SHARDS, names, what, CheckpointError, [MODEL])

    def index(members: Sequence[Member], replaced: Sequence[Member]) -> bytes:
        table = {tensor: m.name for m, shard in zip(members, shards, strict=True) for tensor in shard}
        about = {"total_size": total, "files": [m.entry() for m in members]}
        about |= {"replaces": [m.entry() for m in replaced]} if replaced else {}
        return json.dumps({"metadata": about, "weight_map": table}, indent=2).encode()

    try:
        with file_set.faults():
            total = sum(write_tensors(file_set.file(n), shard, what) for n, shard in enumerate(shards))
        return file_set.commit(None if count == 1 else index)
    finally:
        file_set.close()


# ---------------------------------------------------------------- conversions


def _places(
    config: TransformerConfig, family: Family, wanted: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[NamedVariable, str, int | None, str]]:
    """(row, our variable, its index if layers are stacked, their tensor) for everything to read or write."""
    for row in family.rows(config):
        if "{layer}" not in row.ours:
            yield row, row.ours, None, row.theirs
            continue
        count = config.encoder_layers if row.ours.startswith("encoder/") else config.layers
        for n in range(count):
            stacked = row.ours.format(layer="layers")
            theirs = row.theirs.format(n=n)
            if stacked in wanted:
                yield row, stacked, n, theirs
            else:
                yield row, row.ours.format(layer=f"layer_{n}"), None, theirs


def _sizes(config: TransformerConfig) -> dict[str, int]:
    """Sizes of the dims in patterns."""
    return {
        "heads": config.memory_heads,
        "group": config.heads // config.memory_heads,
        "head_dim": config.head_dim,
        "part": 3,
    }


def _named(pattern: str, config: TransformerConfig) -> dict[str, int]:
    return {
        name: size
        for name, size in _sizes(config).items()
        if name in pattern.replace("(", " ").replace(")", " ").split()
    }


def _expected(row: NamedVariable, ours: tuple[int, ...], config: TransformerConfig) -> tuple[int, ...]:
    """Expected shape of their tensor for one of our variables."""
    if not row.pattern:
        return ours
    nothing = np.broadcast_to(np.zeros((), np.int8), ours)
    back = _theirs(row, nothing, config).shape
    return back if row.part is None else (*back[:-1], 3 * back[-1])


def _take(row: NamedVariable, theirs: tuple[int, ...], ours: tuple[int, ...], config: TransformerConfig) -> str:
    wanted = _expected(row, ours, config)
    return "" if theirs == wanted else f"has shape {list(theirs)}, the model {list(wanted)}"


def _ours(row: NamedVariable, array: Array, shape: tuple[int, ...], config: TransformerConfig) -> Array:
    """Convert their tensor to our variable; its dims of size 1 may be missing from theirs."""
    if row.pattern:
        array = einops.rearrange(array, row.pattern, **_named(row.pattern, config))
    return (array if row.part is None else array[row.part]).reshape(shape)


def _theirs(row: NamedVariable, array: Array, config: TransformerConfig) -> Array:
    """Convert our variable to their tensor, or to its part of it."""
    if not row.pattern:
        return array
    left, _, right = row.pattern.partition(" -> ")
    if row.part is not None:
        left, right = left.replace("part ", ""), right.replace("part ", "")
    sizes = _named(row.pattern, config)
    full = [sizes.get(name, -1) for name in right.split()]
    if -1 in full and full.count(-1) > 1:
        return einops.rearrange(array, f"{right} -> {left}")
    return einops.rearrange(array.reshape(full), f"{right} -> {left}")


class _Files(Mapping[str, Array]):
    """Tensors of one file or several, by names without the optional prefix of some files."""

    def __init__(self, path: object, prefix: str, what: str) -> None:
        self.target = str(path)
        self.tensors: dict[str, Tensors] = {}
        self.names: dict[str, str] = {}
        for file in _files_of(path, what):
            tensors = Tensors(file, what)
            for name in tensors:
                short = name.removeprefix(prefix) if prefix else name
                if short in self.names:
                    raise CheckpointError(f"{what}: {self.target} holds tensor '{short}' twice")
                self.names[short], self.tensors[short] = name, tensors

    def __getitem__(self, name: str) -> Array:
        return self.tensors[name][self.names[name]].astype(np.float32)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return self.tensors[name].header.entries[self.names[name]].shape

    def wrong_kind(self, name: str) -> str:
        """The fault of a tensor without floats, such as a quantised kernel; "" for a tensor of floats."""
        code = self.tensors[name].header.entries[self.names[name]].code
        return "" if code in FLOATS else f"is {code}; weights are {', '.join(FLOATS)}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _check_loaded(path: object, what: str) -> None:
    """Refuse weights beside the config.json of a family that is only planned: its factors or norms are not here."""
    if not isinstance(path, str | os.PathLike):
        return
    place = Path(path)
    beside = (place if place.is_dir() else place.parent) / CONFIG
    if not beside.is_file():
        return
    given, _ = read_json(beside, what, CheckpointError, "a config.json with a model_type", {})
    kind = given.get("model_type")
    if kind in PLANNED:
        raise GraphError(
            f"{at(what)}: {beside} has model_type {kind!r}, whose models are planned here but not run: "
            f"{'; '.join(planned_notes(given, kind)) or 'their tensors have no names here'}"
        )


def _files_of(path: object, what: str) -> list[Path | object]:
    """The tensor files that a path refers to."""
    if not isinstance(path, str | os.PathLike):
        return [path]  # reading reports the error
    place = Path(path)
    if place.is_dir():
        check_holds_weights(place, what)
        there = [name for name in (INDEX, SINGLE) if (place / name).is_file()]
        if not there:
            raise CheckpointError(f"{what}: {place} holds neither {SINGLE} nor {INDEX}")
        place = place / there[0]
    if place.suffix != ".json":
        return [place]
    index, target = read_json(place, what, CheckpointError, "an index of safetensors files", {"weight_map": RECORD})
    try:
        names = sorted({str(name) for name in index["weight_map"].values()})
        entries = index.get("metadata", {}).get("files")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as fault:
        raise CheckpointError(f"{what}: {target} is not an index of safetensors files: {fault!r:.80}") from None
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{what}: {target} names files outside of its folder: {', '.join(names)[:200]}")
    if entries is not None:  # `write_weights` records sizes; other writers' indexes have names alone
        entries = entries if isinstance(entries, list) else [entries]
        known = [Path(checked(place.parent, entry, what, CheckpointError)).name for entry in entries]
        strange = [name for name in names if name not in known]
        if strange:
            raise CheckpointError(f"{what}: {target} maps tensors to {strange[0]:.80}, which is none of its files")
    return [place.parent / name for name in names]
