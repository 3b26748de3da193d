"""Readers of files from outside, each with a sound file for it, and what becomes of their mutants.

    python -m tests.core.hostile FOLDER COUNT [READER ...]

reads so many mutants of each. A mutant is read, or refused by an error of ours: within a second of the process, and in
256 MiB beyond what it had.
"""

from __future__ import annotations

import gc
import gzip
import importlib.util
import json
import random
import shutil
import struct
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import meshlib as mtf
from hardware import HardwareError, load_chip
from meshlib.sharing.programs import forward_program
from meshlib.storage.checkpoint import read_notes
from meshlib.training.history import read_history
from meshlib.validation.validating import validate

SECONDS = 1.0  # of the process, for one file
MOST_BYTES = 256 * 2**20
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")  # of Linux


@dataclass(frozen=True)
class Reader:
    """How a sound file is written, and read; how mutants differ, and how many of a hundred are read by default."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    form: str = "bytes"
    share: int = 100


def matmul() -> tuple[dict[str, mtf.Tensor], list[mtf.Operation]]:
    x, w = mtf.input("x", [mtf.Dimension("batch", 8)]), mtf.variable("w", [], 1.0)
    loss = mtf.reduce_mean(mtf.square(x - w), name="loss")
    return {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)


@cache
def program() -> mtf.Program:
    with mtf.Graph():
        return mtf.lower(*matmul())


def checkpoint(path: Path) -> None:
    mtf.save(mtf.simulate(program()), path, {"training": "{}"})


def batches() -> object:
    return mtf.data.arrays({"x": np.ones(16, np.float32)}).batch(8).repeat()


def trained(path: Path) -> None:
    """The note of a checkpoint, which says where a run was."""
    folder = path.parent / "trained"
    mtf.train(program(), batches(), 1, folder=folder, progress=False)
    path.write_text(read_notes(folder / "step_000000001.safetensors")["training"])


def go_on(path: Path) -> object:
    folder = path.parent / f"{path.name}.run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        note = path.read_bytes().decode()
    except UnicodeDecodeError:
        return None  # notes are text
    mtf.save(mtf.simulate(program()), folder / "step_000000001.safetensors", {"training": note})
    return mtf.train(program(), batches(), 2, folder=folder, progress=False)


def picture(path: Path) -> None:
    from PIL import Image

    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(path, "PNG")


LLAMA = {
    "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32,
    "vocab_size": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}, "tie_word_embeddings": False,
}  # fmt: skip
PARAMS = {
    "dim": 16, "n_layers": 2, "n_heads": 4, "multiple_of": 8, "ffn_dim_multiplier": 1.3, "vocab_size": 64,
    "moe": {"num_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
RESNET = {"model_type": "resnet", "hidden_sizes": [16, 32], "depths": [1, 2], "embedding_size": 4, "num_labels": 3}
ROW = {
    "id": "a", "kind": "micro", "family": "microbench", "chip": "v7", "n_chips": 4, "slice": {"topology": "2x2x1"},
    "model": {"op": "matmul m=n=k", "n": 256}, "precision": "bf16", "measured": {"tflops_per_s_per_device": 18.3},
}  # fmt: skip


def text(content: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def tokenizer(path: Path) -> None:
    folder = path.parent / "tokenizer"
    folder.mkdir(exist_ok=True)
    mtf.BytePairs.learn("the cat sat on the mat, the dog on the log", 270).save(folder / "tokenizer.json")
    path.write_bytes((folder / "tokenizer.json").read_bytes())


def search_file(path: Path) -> None:
    mtf.search(matmul, "v5e-1", seconds=None, workers=1, axes=0, resume=path)


def idx(path: Path, packed: bool = False) -> None:
    raw = bytes([0, 0, 8, 2]) + struct.pack(">II", 3, 4) + bytes(12)
    path.write_bytes(gzip.compress(raw, mtime=0) if packed else raw)


def load_checkpoint(path: Path) -> None:
    mtf.load(path, mtf.simulate(program()))


TINY = mtf.models.preset("gpt2").reduced().replace(layers=1, d_model=16, heads=2, d_ff=16)


@cache
def values() -> dict[str, np.ndarray[Any, Any]]:
    variables = forward_program(TINY, None).variables
    return {name: np.ones(v.tensor.shape.sizes, np.float32) for name, v in variables.items()}


def weights(path: Path) -> None:
    folder = path.parent / "one"
    folder.mkdir()
    mtf.sharing.write_weights(values(), TINY, folder)
    path.write_bytes((folder / "model.safetensors").read_bytes())


def index(path: Path) -> None:
    folder = path.parent / "several"
    folder.mkdir()
    mtf.sharing.write_weights(values(), TINY, folder, shard_bytes=4000)
    path.write_bytes((folder / "model.safetensors.index.json").read_bytes())


def copied(path: Path, to: Path) -> None:
    to.unlink(missing_ok=True)
    shutil.copyfile(path, to)


def read_index(path: Path) -> object:
    copied(path, path.parent / "several" / "model.safetensors.index.json")
    return dict(mtf.sharing.read_weights(path.parent / "several", TINY))


def exported(path: Path) -> None:
    mtf.export(values(), path.parent / "model", TINY)
    path.write_bytes((path.parent / "model" / "config.json").read_bytes())


def read_exported(path: Path) -> object:
    copied(path, path.parent / "model" / "config.json")
    return mtf.load_model(path.parent / "model")


FIELDS = {"label": mtf.data.Field("int32"), "x": mtf.data.Field("float32", (3,)), "name": mtf.data.Field("bytes")}
EXAMPLES = [{"label": n, "x": [n, 0.5, -1.0], "name": f"row {n}"} for n in range(5)]


def records(path: Path) -> None:
    mtf.records.write(path, map(mtf.records.encode, EXAMPLES))


def packed_records(path: Path) -> None:
    records(path)
    path.write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def decoded(path: Path) -> object:
    return [mtf.records.decode(record) for record in mtf.records.read(path)]


def skipped(path: Path) -> object:
    return list(mtf.data.records(path, FIELDS, on_fault="skip").shuffle(0, buffer=3))


def manifest(path: Path) -> None:
    (path.parent / "set").mkdir()
    mtf.records.write(path.parent / "set" / "t@2", map(mtf.records.encode, EXAMPLES))
    path.write_bytes((path.parent / "set" / ".t@2.json").read_bytes())


def read_set(path: Path) -> object:
    copied(path, path.parent / "set" / ".t@2.json")
    return [list(mtf.records.read(path.parent / "set" / name if name else path.parent / "set")) for name in ("t@2", "")]


def table(path: Path) -> object:
    return mtf.records.make(path, path.parent / "made.records")


def snapshot(path: Path) -> None:
    mtf.testing.assert_snapshot(program(), path, update=True)


def compared(path: Path) -> None:
    with suppress(AssertionError):
        mtf.testing.assert_snapshot(program(), path)


MAXTEXT = """
base_emb_dim: 64
base_num_query_heads: 4
base_num_kv_heads: 4
base_mlp_dim: 128
base_num_decoder_layers: 2
head_dim: 16
vocab_size: 64
max_target_length: 16
per_device_batch_size: 1.0
mesh_axes: ['data', 'fsdp', 'tensor']
logical_axis_rules: [['batch', ['data', 'fsdp']], ['mlp', 'tensor'], ['embed', ['fsdp']]]
data_sharding: [['data', 'fsdp', 'tensor']]
learning_rate: 3.e-5
"""
HLO = """HloModule m, is_scheduled=true, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

ENTRY %main (a: bf16[16,8], b: f32[64,8]) -> f32[64,8] {
  %a = bf16[16,8]{1,0:T(8,128)(2,1)} parameter(0)
  %b = f32[64,8]{1,0} parameter(1)
  %g = bf16[64,8]{1,0} all-gather(%a), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %r = f32[64,8]{1,0} all-reduce(%b), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""


def explained(path: Path) -> object:
    from meshlib.command.compiled import hlo_text  # imports JAX

    named = path.with_suffix(".hlo")
    copied(path, named)
    return str(mtf.jax.explain(str(hlo_text(str(named))), "v5e-4", "data:4"))


def executable(path: Path) -> None:
    from meshlib.jax.executables import jax_versions, write_executable  # imports JAX

    slice, body = SimpleNamespace(name="v5e-1"), bytes(range(256))
    what = {"program": program(), "slice": slice, "device_kind": "TPU", "versions": jax_versions(), "executable": body}
    write_executable(path, SimpleNamespace(**what))


def read_back(path: Path) -> object:
    from meshlib.jax.executables import jax_versions, read_executable  # imports JAX

    return read_executable(path, program(), "TPU", jax_versions())


READERS: dict[str, Reader] = {
    "load": Reader(checkpoint, load_checkpoint),
    "read_notes": Reader(checkpoint, read_notes),
    "read_weights": Reader(weights, lambda path: dict(mtf.sharing.read_weights(path, TINY))),
    "read_weights of an index": Reader(index, read_index, "json", 50),
    "read_config": Reader(text(LLAMA), mtf.sharing.read_config, "json"),
    "read_config of params": Reader(text(PARAMS), mtf.sharing.read_config, "json"),
    "read_image_config": Reader(text(RESNET), mtf.sharing.read_image_config, "json"),
    "load_model": Reader(exported, read_exported, "json", 50),
    "BytePairs.load": Reader(tokenizer, mtf.BytePairs.load, "json"),
    "search(resume=)": Reader(
        search_file, lambda path: mtf.search(matmul, "v5e-1", workers=1, axes=0, resume=path), "json", 20
    ),
    "validate --file": Reader(text({"rows": [ROW]}), validate, "json", 50),
    "read_history": Reader(text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n'), read_history),
    "train on a note": Reader(trained, go_on, "json", 30),
    "read_idx": Reader(idx, lambda path: mtf.data.idx({"x": path})),
    "read_idx, packed": Reader(lambda path: idx(path, True), lambda path: mtf.data.idx({"x": path})),
    "records": Reader(records, decoded),
    "records, packed": Reader(packed_records, decoded),
    "records of data": Reader(records, lambda path: list(mtf.data.records(path, FIELDS))),
    "records of data, skipped": Reader(packed_records, skipped),
    "records of a set": Reader(manifest, read_set, "json"),
    "decode": Reader(
        lambda path: path.write_bytes(mtf.records.encode(EXAMPLES[1])),
        lambda path: mtf.records.decode(path.read_bytes()),
    ),
    "a table": Reader(text("name,label,x\na,1,0.5\nb,2,1e3\n"), table, share=50),
    "a text": Reader(text("to be\nor not\n"), lambda path: list(mtf.data.text(path))),
    "a snapshot": Reader(snapshot, compared),
    "load_chip": Reader(text('name = "mine"\nbase = "v5e"\nhbm_bytes_per_second = 1.6e12\n'), load_chip),
}
if importlib.util.find_spec("yaml") is not None:
    READERS["read_maxtext"] = Reader(text(MAXTEXT), mtf.models.read_maxtext, share=30)
if importlib.util.find_spec("jax") is not None:
    READERS["explain a compiled program"] = Reader(text(HLO), explained, share=50)
    READERS["a compiled step"] = Reader(executable, read_back, share=30)
if importlib.util.find_spec("PIL") is not None:
    READERS["read_image"] = Reader(picture, mtf.records.images.read_image)
WRONG: list[object] = [None, True, -1, 0, 10**400, 1e308, "x", "", [], {}, [[]], {"a": {}}, float("nan"), "\ud800", 3.5]


def mutated(raw: bytes, rng: random.Random, as_json: bool) -> bytes:
    """A file that differs in one or two places."""
    if as_json and rng.random() < 0.6:
        return edited(json.loads(raw), rng)
    made = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, kind = rng.randrange(len(made) + 1), rng.randrange(6)
        if kind == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del made[at : at + rng.choice((1, 2, 8, len(made)))]
        elif kind == 2:
            made[at:at] = rng.choice((b"[" * 2000, b'{"a":' * 2000, b"9" * 5000, b"\0", b"\xff\xfe", b'"a":1,"a":2,'))
        elif kind == 3:
            made[at : at + 8] = rng.randbytes(8)
        elif kind == 4:
            made[at:at] = made[max(0, at - rng.randrange(1, 64)) : at]
        elif len(made) > 8:
            made[:8] = struct.pack("<Q", rng.choice((0, 1, 2**63, 2**32, len(made), rng.randrange(2**20))))
    return bytes(made)


def edited(document: Any, rng: random.Random) -> bytes:
    """JSON with one value in the place of another, or one key twice."""
    place, key = document, None
    parent = None
    while isinstance(place, dict | list) and place and (key is None or rng.random() < 0.7):
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        parent, place = place, place[key]
    if parent is not None:
        if rng.random() < 0.2 and isinstance(parent, dict):
            del parent[key]
        else:
            parent[key] = rng.choice(WRONG)
    made = json.dumps(document)
    if rng.random() < 0.1:
        made = made.replace("{", '{"model_type": "t5", "model_type": "gpt2", ', 1)
    return made.encode("utf-8", "surrogatepass")


class Peak:
    """The most memory that the process has taken since `begin`; of systems without /proc nothing is known."""

    def begin(self) -> None:
        self.before = self._read("VmRSS:")
        with suppress(OSError):
            CLEAR.write_text("5")

    def bytes(self) -> int:
        return self._read("VmHWM:") - self.before

    def _read(self, name: str) -> int:
        if not CLEAR.exists():
            return 0
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024


def refusal(reader: str, path: Path) -> str | None:
    """Read a file: the error of ours that it meets, if it does; AssertionError if it takes too much."""
    peak, begun, refused = Peak(), time.process_time(), None
    peak.begin()
    gc.disable()  # a collection looks at all that this process holds
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            READERS[reader].read(path)
    except (mtf.MeshlibError, HardwareError) as fault:
        refused = str(fault)
    finally:
        gc.enable()
    seconds, taken = time.process_time() - begun, peak.bytes()
    assert seconds < SECONDS, f"{seconds:.1f} s"
    assert taken < MOST_BYTES, f"{taken:,} bytes"
    return refused


def fuzz(reader: str, count: int, folder: Path) -> int:
    """Read mutants; how many were refused."""
    own = READERS[reader]
    own.write(folder / "sound")
    assert refusal(reader, folder / "sound") is None
    raw, rng, refused = (folder / "sound").read_bytes(), random.Random(reader), 0
    for n in range(count):
        path = folder / f"mutant{n % 4}"
        path.unlink(missing_ok=True)  # some file systems bring a file to the disk that is written over
        path.write_bytes(mutated(raw, rng, own.form == "json"))
        try:
            said = refusal(reader, path)
        except Exception as fault:
            raise AssertionError(f"{reader}: mutant {n}, {path.read_bytes()[:300]!r}: {fault!r:.300}") from fault
        assert said is None or 0 < len(said) < 8000, f"{reader}: mutant {n}: {said!r:.300}"
        refused += said is not None
    return refused


def main(base: Path, count: int, names: list[str]) -> None:
    """Some readers, or all."""
    for name in names or READERS:
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        begun = time.process_time()
        refused = fuzz(name, count, base)
        seconds = round(time.process_time() - begun, 1)
        print(json.dumps({"reader": name, "mutants": count, "refused": refused, "cpu_seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
