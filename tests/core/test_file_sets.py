"""Sets of files: killed writers leave all of the old or all of the new; readers refuse what no manifest names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import meshlib as mtf
from meshlib.core import file_versions
from meshlib.storage.safetensors import Tensors
from tests.effort import deep

TINY = mtf.models.preset("gpt2").reduced()
PARTS = 40_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_no_kill_tears_a_set(tmp_path: Path) -> None:
    """All kills: `python -m tests.core.torn FOLDER 1`."""
    some = ["17", "another kind each time", "weights in shards, then one file", "records"]
    command = [sys.executable, "-m", "tests.core.torn", str(tmp_path), *(["1"] if deep() else some)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["kills"] > 10


def weights(number: float) -> dict[str, np.ndarray]:
    with mtf.Graph():
        outputs, _ = mtf.models.train_step(TINY, batch=1, length=4)
        shapes = mtf.lower(outputs).variables
    return {name: np.full(v.tensor.shape.sizes, number, np.float32) for name, v in shapes.items()}


def number_of(folder: Path) -> set[float]:
    return {float(n) for x in mtf.sharing.read_weights(folder, TINY).values() for n in np.unique(x)}


def test_weights_written_over_others_are_the_ones_that_are_read(tmp_path: Path) -> None:
    for number, shard_bytes in enumerate((PARTS, 10**9, PARTS, PARTS // 2, PARTS, 10**9)):
        names = mtf.sharing.write_weights(weights(number), TINY, tmp_path, shard_bytes=shard_bytes)
        assert number_of(tmp_path) == {number}
        index = [] if shard_bytes == 10**9 else ["model.safetensors.index.json"]
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, *index])
        assert not any("~" in name for name in names)


def test_shards_of_two_sets_are_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        mtf.sharing.write_weights(weights(number), TINY, tmp_path / str(number), shard_bytes=PARTS)
    name = sorted(p.name for p in (tmp_path / "1").glob("*.safetensors"))[1]
    (tmp_path / "1" / name).write_bytes((tmp_path / "2" / name).read_bytes())
    with pytest.raises(mtf.CheckpointError, match=rf"{name} is damaged, or of another set: its manifest says the CRC"):
        mtf.sharing.read_weights(tmp_path / "1", TINY)
    index = tmp_path / "1/model.safetensors.index.json"
    table = json.loads(index.read_text())
    del table["metadata"]["files"]  # as other libraries write it
    index.write_text(json.dumps(table))
    assert number_of(tmp_path / "1") == {1.0, 2.0}


def test_files_of_others_stay_when_a_set_is_written_over(tmp_path: Path) -> None:
    others = ("generation_config.json", "model-00001-of-00002.bin", "notes~1a2b3c4d.safetensors", "tokenizer.json")
    for name in others:
        (tmp_path / name).write_text("mine")
    for number in (0, 1):
        mtf.sharing.write_weights(weights(number), TINY, tmp_path, shard_bytes=PARTS)
        mtf.export(weights(number), tmp_path, TINY)
    assert all((tmp_path / name).read_text() == "mine" for name in others)


def test_what_is_written_last_is_what_readers_find(tmp_path: Path) -> None:
    """An exported model replaces weights in one file or in shards, and is replaced by them."""
    writers = {
        "export": lambda n: mtf.export(weights(n), tmp_path, TINY),
        "shards": lambda n: mtf.sharing.write_weights(weights(n), TINY, tmp_path, shard_bytes=PARTS),
        "file": lambda n: mtf.sharing.write_weights(weights(n), TINY, tmp_path),
    }
    for number, kind in enumerate(("shards", "export", "shards", "file", "export", "file", "export"), start=1):
        writers[kind](number)
        if kind == "export":
            assert {float(n) for x in mtf.load_model(tmp_path).state.values() for n in np.unique(x)} == {number}
            with pytest.raises(mtf.CheckpointError, match=r"is a model that mtf.export wrote; read it with mtf.load_m"):
                number_of(tmp_path)
            assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
        else:
            assert number_of(tmp_path) == {number}
            with pytest.raises(mtf.CheckpointError, match="Hugging Face names, not a model of mtf"):
                mtf.load_model(tmp_path)
            assert not (tmp_path / "config.json").exists()


def test_an_export_leaves_the_weights_of_other_libraries(tmp_path: Path) -> None:
    mtf.sharing.write_weights(weights(1), TINY, tmp_path, shard_bytes=PARTS)
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": table["weight_map"]}))  # as Hugging Face writes it
    mtf.export(weights(2), tmp_path, TINY)
    with pytest.raises(mtf.CheckpointError, match=r"the latest set in .* is a model that mtf.export wrote"):
        number_of(tmp_path)
    assert number_of(index) == {1}  # type: ignore[arg-type]
    index.write_text(json.dumps({"weight_map": table["weight_map"], "metadata": {}}))  # put there later
    assert number_of(tmp_path) == {1}


def test_records_that_no_manifest_names_are_refused(tmp_path: Path) -> None:
    mtf.records.write(tmp_path / "t@2", [b"a", b"b"])
    stray = tmp_path / "t-00001~1a2b3c4d-of-00002"
    stray.write_bytes((tmp_path / "t-00001-of-00002").read_bytes())
    for paths in (tmp_path, tmp_path / "t-*", tmp_path / "t@2"):
        assert list(mtf.records.read(paths)) == [b"a", b"b"]
    with pytest.raises(
        mtf.DataError, match=r"is left from an earlier set, or one that was never finished: .*t@2\.json"
    ):
        mtf.records.read([tmp_path / "t-00000-of-00002", stray])
    mtf.records.write(tmp_path / "t@2", [b"c", b"d"])
    assert not stray.exists()
    whole = (tmp_path / "t-00001-of-00002").read_bytes()
    (tmp_path / "t-00001-of-00002").write_bytes(whole + whole)
    with pytest.raises(mtf.DataError, match=rf"manifest says {len(whole)} bytes, it has {2 * len(whole)}"):
        mtf.records.read(tmp_path / "t@2")
    (tmp_path / ".t@2.json").write_text("[" * 10_000)
    with pytest.raises(mtf.DataError, match="is not a manifest of a set of records"):
        mtf.records.read(tmp_path)
    (tmp_path / ".t@2.json").unlink()  # as files of other programs, which have none
    assert list(mtf.records.read(tmp_path / "t@2")) == [b"c", b"d", b"d"]


def numbered(folder: Path, number: int) -> None:
    """A set of three files, each as long as that of another number."""
    mtf.records.write(folder / "t@3", [f"{number}:{k}".encode() for k in range(6)])


def test_records_that_are_written_again_are_not_read_on(tmp_path: Path) -> None:
    numbered(tmp_path, 1)
    rows, data = mtf.records.read(tmp_path / "t@3"), mtf.data.records(tmp_path / "t@3")
    lines = tmp_path / "a.txt"
    lines.write_text("to be\nor not\n")
    texts = mtf.data.text(lines)
    assert next(rows).startswith(b"1:")
    numbered(tmp_path, 2)
    lines.write_text("so it\ngoes on\n")
    for again in (rows, data, texts):
        with pytest.raises(mtf.DataError, match=r"was written again while it was read: it had \d+ bytes, and has \d+"):
            list(again)
    assert {row[:1] for row in mtf.records.read(tmp_path / "t@3")} == {b"2"}


@pytest.mark.parametrize("times", [1, 99])
def test_a_set_that_is_written_again_is_read_again(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is done between the first file of a set and the next, once or each time."""
    mtf.sharing.write_weights(weights(1), TINY, tmp_path, shard_bytes=PARTS)
    left, take = times, Tensors.__getitem__

    def taken(tensors: Tensors, name: str) -> np.ndarray:
        nonlocal left
        read = take(tensors, name)
        if left and name.startswith("wte"):
            left -= 1
            mtf.sharing.write_weights(weights(2 + left % 2), TINY, tmp_path, shard_bytes=PARTS)
        return read

    monkeypatch.setattr(Tensors, "__getitem__", taken)
    monkeypatch.setattr(file_versions, "ATTEMPTS", 3)
    if times == 1:
        assert number_of(tmp_path) == {2.0}
    else:
        with pytest.raises(mtf.CheckpointError, match=r"was written again 3 times while it was read; wait for its wri"):
            number_of(tmp_path)


def test_where_there_are_no_links_members_keep_their_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    for number in (1, 2, 3):
        names = mtf.sharing.write_weights(weights(number), TINY, tmp_path, shard_bytes=PARTS)
        assert all("~" in name for name in names)
        assert number_of(tmp_path) == {number}
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, "model.safetensors.index.json"])
