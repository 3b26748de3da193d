"""Readers of files from outside, given damaged and hostile ones: an error of ours, soon, in little memory.

`READERS` has a row for each reader, with a small sound file for it. Mutants flip, cut, repeat and insert bytes, and
edit JSON as JSON: deep nesting, equal keys, other types, huge numbers. `HOSTILE` are files that are made to hurt.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshlib as mtf
from hardware import HardwareError, load_chip
from meshlib.checkpoint import read_notes
from meshlib.training.history import read_history
from meshlib.validation.validating import _load as read_rows
from meshlib.vocabulary.words import compiled, words
from tests.effort import deep

Read = Callable[[Path], object]
SECONDS = 1.0  # of the process, for one file


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
    folder.mkdir(exist_ok=True)
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
ROW = {"id": "a", "family": "x", "chip": "v5e", "measured": 1.0}


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


READERS: dict[str, tuple[Callable[[Path], object], Read]] = {
    "load": (checkpoint, load_checkpoint),
    "read_notes": (checkpoint, read_notes),
    "read_weights": (
        checkpoint,
        lambda path: dict(mtf.sharing.read_weights(path, mtf.models.preset("gpt2").reduced())),
    ),
    "read_config": (text(LLAMA), mtf.sharing.read_config),
    "BytePairs.load": (tokenizer, mtf.BytePairs.load),
    "search(resume=)": (search_file, lambda path: mtf.search(matmul, "v5e-1", workers=1, axes=0, resume=path)),
    "validate --file": (text({"rows": [ROW]}), read_rows),
    "read_history": (text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": NaN}\n'), read_history),
    "train on a note": (trained, go_on),
    "read_idx": (idx, lambda path: mtf.data.idx({"x": path})),
    "read_idx, packed": (lambda path: idx(path, True), lambda path: mtf.data.idx({"x": path})),
    "load_chip": (text('name = "mine"\nbase = "v5e"\nhbm_bytes_per_second = 1.6e12\n'), load_chip),
}
JSON = {"read_config", "BytePairs.load", "search(resume=)", "validate --file", "train on a note"}
SLOW = {"train on a note": 10, "search(resume=)": 3, "BytePairs.load": 2}  # times as few mutants
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


@pytest.mark.parametrize("reader", READERS)
def test_mutants_are_read_or_refused(reader: str, tmp_path: Path) -> None:
    write, read = READERS[reader]
    write(tmp_path / "sound")
    read(tmp_path / "sound") if reader != "read_weights" else None
    raw, rng = (tmp_path / "sound").read_bytes(), random.Random(reader)
    for n in range((10_000 if deep() else 100) // SLOW.get(reader, 1)):
        path = tmp_path / f"mutant{n % 4}"
        path.write_bytes(mutated(raw, rng, reader in JSON))
        begun, said = time.process_time(), 0
        try:
            read(path)
        except (mtf.MeshlibError, HardwareError) as fault:
            said = len(str(fault))
        except Exception as fault:
            raise AssertionError(f"{reader}: mutant {n}, {path.read_bytes()[:300]!r}: {fault!r:.300}") from fault
        assert time.process_time() - begun < SECONDS, f"{reader}: mutant {n}"
        assert said < 8000, f"{reader}: mutant {n}"


# ---------------------------------------------------------------- made to hurt

LIMITED = """
import resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import tests.test_hostile_files as hostile
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begun = time.process_time()
try:
    hostile.READERS[sys.argv[2]][1](Path(sys.argv[3]))
except (hostile.mtf.MeshlibError, hostile.HardwareError) as fault:
    print("refused", str(fault)[:300])
print(time.process_time() - begun, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def header_twice(path: Path) -> None:
    """A safetensors header of 16 MiB whose last key occurs twice."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    body = ",".join(f'"w{n}":{entry}' for n in range(250_000))
    raw = f'{{{body},"w249999":{entry}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)


def bomb(path: Path) -> None:
    """An IDX file that says, and unpacks to, 300 MB of zeros from 0.3 MB."""
    packer = zlib.compressobj(9, wbits=31)
    with path.open("wb") as file:
        file.write(packer.compress(bytes([0, 0, 8, 1]) + struct.pack(">I", 300 * 2**20)))
        for _ in range(300):
            file.write(packer.compress(bytes(2**20)))
        file.write(packer.flush())


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a header with a key twice": ("read_notes", header_twice),
    "a gzip bomb": ("read_idx", bomb),
    "nested JSON": ("read_config", text("[" * 10**6)),
    "nested rows": ("validate --file", text('{"rows":' * 10**5)),
    "a huge file": ("read_config", lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**34)),
    "a huge chip": ("load_chip", lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**34)),
    "a huge history": ("read_history", lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_RDWR), 2**34)),
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="measures memory as Linux says it")
@pytest.mark.parametrize("about", HOSTILE)
def test_hostile_files_take_little(about: str, tmp_path: Path) -> None:
    reader, write = HOSTILE[about]
    write(tmp_path / "hostile")
    made = subprocess.run(
        [sys.executable, "-c", LIMITED, str(Path(__file__).parents[1]), reader, str(tmp_path / "hostile")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    said, _, figures = made.stdout.strip().rpartition("\n")
    seconds, mebibytes = map(float, figures.split())
    assert said.startswith("refused"), made.stdout
    assert seconds < 4 * SECONDS  # of a header of 16 MiB json.loads alone takes most
    assert mebibytes < 256


NO_FILES: dict[str, Callable[[Path], object]] = {
    **{name: read for name, (_, read) in READERS.items() if name not in ("train on a note", "read_weights")},
    "read_image": lambda path: mtf.records.images.read_image(path),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("reader", NO_FILES)
def test_pipes_and_devices_are_refused(reader: str, tmp_path: Path) -> None:
    """Reading the one would wait for a writer, the other never end."""
    if reader == "read_image":
        pytest.importorskip("PIL")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises((mtf.MeshlibError, HardwareError)):
            NO_FILES[reader](path)


SLOW_PATTERNS = ["(?:a+)+$", "a{99999999999}", "(a*)*b", "(?:a|aa)*b", "a*a*a*a*b", r"(a)\1+", "(" * 5000 + ")" * 5000]


@pytest.mark.parametrize("pattern", SLOW_PATTERNS)
def test_patterns_that_take_long_are_refused(pattern: str) -> None:
    with pytest.raises(mtf.GraphError, match="can't be used here"):
        compiled(pattern)


PUBLISHED = [  # of GPT-2, cl100k, o200k; and one that groups digits from the right
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{Lm}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_are_not(pattern: str) -> None:
    for run in ("a" * 2000, " " * 2000, "1" * 300, "'" * 2000):
        begun = time.process_time()
        assert "".join(words(run, pattern)) == run
        assert time.process_time() - begun < SECONDS


def test_a_model_of_more_parameters_than_its_file_holds(tmp_path: Path) -> None:
    config = mtf.models.preset("gpt2").reduced()
    with mtf.Graph():
        sim = mtf.simulate(mtf.lower(*mtf.models.train_step(config, 2, 8)))
    mtf.export(sim, tmp_path, config)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": _with_layers(json.loads(path.read_text()))}))
    begun = time.process_time()
    with pytest.raises(
        mtf.CheckpointError, match=r"the model has at least [\d,]+ parameters, but .* has only [\d,]+ bytes"
    ):
        mtf.load_model(tmp_path)
    assert time.process_time() - begun < SECONDS


def _with_layers(record: dict[str, Any]) -> dict[str, Any]:
    return {**record["model"], "layers": 100_000_000}
