"""Readers of files from outside, given damaged and hostile ones: an error of ours, soon, in little memory.

`tests.core.hostile` has the readers, each with a small sound file for it. Mutants flip, cut, repeat and insert bytes,
and edit JSON as JSON: deep nesting, equal keys, other types, huge numbers. `HOSTILE` are files that are made to hurt.
"""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshlib as mtf
from hardware import HardwareError
from meshlib.data.samples import load_verses
from meshlib.data.vocabulary.merges import compiled, words
from tests.core.hostile import MOST_BYTES, READERS, SECONDS, Peak, fuzz, text
from tests.effort import draws


@pytest.mark.parametrize("reader", READERS)
def test_mutants_are_read_or_refused(reader: str, tmp_path: Path) -> None:
    count = draws(2 * READERS[reader].share, 10_000)
    assert fuzz(reader, count, tmp_path) > count // 5


# ---------------------------------------------------------------- made to hurt


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


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


HOSTILE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a header with a key twice": ("read_notes", header_twice),
    "a gzip bomb": ("read_idx", bomb),
    "nested JSON": ("read_config", text("[" * 10**6)),
    "nested rows": ("validate --file", text('{"rows":' * 10**5)),
    "aliases of aliases": ("read_maxtext", text(ALIASES)),
    "nested YAML": ("read_maxtext", text("a: " + "[" * 10**5)),
}


@pytest.mark.parametrize("about", HOSTILE)
def test_hostile_files_take_little(about: str, tmp_path: Path) -> None:
    reader, write = HOSTILE[about]
    if reader not in READERS:
        pytest.skip("needs an extra")
    write(tmp_path / "hostile")
    peak, begun = Peak(), time.process_time()
    peak.begin()
    with pytest.raises((mtf.MeshlibError, HardwareError)):
        READERS[reader].read(tmp_path / "hostile")
    assert time.process_time() - begun < 2 * SECONDS  # where others use the machine, too
    assert peak.bytes() < MOST_BYTES


AROUND = (  # copy it first, or take what is no file for something else
    "train on a note", "read_weights of an index", "load_model", "records of a set", "decode",
    "explain a compiled program",
)  # fmt: skip
NO_FILES: dict[str, Callable[[Path], object]] = {
    **{name: reader.read for name, reader in READERS.items() if name not in AROUND},
    "verses": lambda path: load_verses(str(path)),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("reader", NO_FILES)
def test_pipes_and_devices_are_refused(reader: str, tmp_path: Path) -> None:
    """Reading the one would wait for a writer, the other never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises((mtf.MeshlibError, HardwareError)):
            NO_FILES[reader](path)


@pytest.mark.parametrize("reader", [name for name in READERS if name not in AROUND])
def test_of_a_huge_file_without_content_little_is_read(reader: str, tmp_path: Path) -> None:
    """Zeros, which a file system need not keep: no line, header or array takes them all."""
    path = tmp_path / "huge"
    path.touch()
    os.truncate(path, 2**33)
    peak, begun = Peak(), time.process_time()
    peak.begin()
    with pytest.raises((mtf.MeshlibError, HardwareError)):
        READERS[reader].read(path)
    assert time.process_time() - begun < SECONDS
    assert peak.bytes() < MOST_BYTES


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
    return {**record["model"], "layers": 100_000}
