"""Writers killed at every system call that changes a file: `python -m tests.core.torn FOLDER EVERY [WRITER ...]`.

For each writer a folder holds what it wrote before; a forked process writes something else into it, and sends itself
SIGKILL before the first, second, ... of these calls (each EVERY-th). What readers find afterwards must be all of the
old or all of the new; and the next writer must leave no other files than one that nobody killed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import meshlib as mtf
from meshlib.core import files
from meshlib.sharing.programs import forward_program
from meshlib.training.history import History, read_history

TINY = mtf.models.preset("gpt2").reduced().replace(vocab=300)
WORDS = mtf.BytePairs.learn("to be or not to be", 300), mtf.BytePairs.learn("a rose is a rose is a rose", 290)


@dataclass
class Writer:
    """One way to write: `write(folder, n)`, and what `read(folder)` finds after it."""

    write: Callable[[Path, int], Any]
    read: Callable[[Path], Any]


def values(n: int) -> dict[str, np.ndarray[Any, Any]]:
    program = forward_program(TINY, None)
    return {
        name: np.full(v.tensor.shape.sizes, n + k / 100, np.float32)
        for k, (name, v) in enumerate(program.variables.items())
    }


VALUES = {n: values(n) for n in range(3)}


def first_of(weights: dict[str, Any]) -> list[float]:
    return [float(x.reshape(-1)[0]) // 1 for x in weights.values()]


def safetensors_by_index(folder: Path) -> list[float]:
    """As libraries do that know nothing of our manifests: the index says which file has which tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = []
    for tensor, name in index["weight_map"].items():
        raw = (folder / name).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        begin, end = json.loads(raw[8 : 8 + length])[tensor]["data_offsets"]
        found.append(float(np.frombuffer(raw[8 + length + begin : 8 + length + end], np.float32)[0]) // 1)
    return found


def all_alike(found: list[float]) -> float:
    assert len(set(found)) == 1, found
    return found[0]


def exported(folder: Path) -> Any:
    model = mtf.load_model(folder)
    number = all_alike(first_of(model.state))
    return number, len(model.tokenizer) if model.tokenizer is not None else 0


def export(folder: Path, n: int) -> None:
    mtf.export(VALUES[n], folder, TINY, tokenizer=WORDS[n] if n < 2 else None)


def weights(shard_bytes: Callable[[int], int]) -> Callable[[Path, int], Any]:
    return lambda folder, n: mtf.sharing.write_weights(VALUES[n], TINY, folder, shard_bytes=shard_bytes(n))


def read_weights(folder: Path) -> float:
    return all_alike(first_of(mtf.sharing.read_weights(folder, TINY)))


def either(kinds: str) -> Writer:
    """Exported models and weights in one folder: which of them the n-th writer writes, "e", "s" (shards) or "w"."""

    def write(folder: Path, n: int) -> None:
        if kinds[n] == "e":
            mtf.export(VALUES[n], folder, TINY)
        else:
            shard_bytes = 40_000 if kinds[n] == "s" else 10**9
            mtf.sharing.write_weights(VALUES[n], TINY, folder, shard_bytes=shard_bytes)

    def read(folder: Path) -> Any:
        """What each reader reads; "the other" where it says that the latest is of the other kind."""
        answers: list[Any] = []
        for reader in (read_weights, lambda f: exported(f)[0]):
            try:
                answers.append(reader(folder))
            except mtf.CheckpointError as fault:
                said = re.search("the latest set in .* (is|has) |is (damaged|not the file)", str(fault))
                answers.append("the other" if said else str(fault))
        return answers

    return Writer(write, read)


def records(name: str) -> Callable[[Path, int], Any]:
    # As many bytes for each: sizes tell nothing.
    return lambda folder, n: mtf.records.write(folder / name, [f"{n}:{k:03d}".encode() for k in range(40)])


def read_records(*names: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        found = [list(mtf.records.read(folder / name if name else folder)) for name in names]
        assert all(sorted(rows) == sorted(found[0]) for rows in found)
        assert len(found[0]) == 40
        return all_alike([float(row.split(b":")[0]) for row in found[0]])

    return read


def history(folder: Path, n: int) -> None:
    """Rows of three steps at first; then the file is cut where a run goes on: behind step 1, or 0."""
    rows = History(folder / "history.jsonl")
    if not (folder / "history.jsonl").exists():
        for step in (1, 2, 3):
            rows.add({"step": step, "loss": 1.0})
    rows.resume({0: 3, 1: 1, 2: 0}[n])
    rows.save_csv(folder / "history.csv")


def program() -> mtf.Program:
    with mtf.Graph():
        w = mtf.variable("w", [mtf.Dimension("d", 5)], 1.0)
        return mtf.lower(updates=[mtf.assign(w, w * 2)])


PROGRAM = program()


def save(folder: Path, n: int) -> None:
    sim = mtf.simulate(PROGRAM, seed=n)
    sim.state["w"] = np.full(5, n, np.float32)
    mtf.save(sim, folder / "state.safetensors")


def loaded(folder: Path) -> Any:
    sim = mtf.simulate(PROGRAM)
    mtf.load(folder / "state.safetensors", sim)
    return sim.seed, sim.state["w"].tolist()


WRITERS = {
    "export": Writer(export, exported),
    "weights in shards": Writer(weights(lambda n: 40_000), lambda f: (read_weights(f), safetensors_by_index(f)[0])),
    "weights in shards, then one file": Writer(weights(lambda n: 40_000 if n == 0 else 10**9), read_weights),
    "weights in one file, then shards": Writer(weights(lambda n: 10**9 if n == 0 else 40_000), read_weights),
    "weights in more shards than before": Writer(weights(lambda n: 60_000 if n == 0 else 20_000), read_weights),
    "weights in fewer shards than before": Writer(weights(lambda n: 20_000 if n == 0 else 60_000), read_weights),
    "an export over shards": either("ses"),
    "an export over one file": either("wew"),
    "shards over an export": either("ese"),
    "one file over an export": either("ewe"),
    "another kind each time": either("esw"),
    "records": Writer(records("t@8"), read_records("t@8", "t-*", "")),
    "records in one file": Writer(records("t"), read_records("t", "")),
    "checkpoint": Writer(save, loaded),
    "vocabulary": Writer(
        lambda f, n: WORDS[n % 2].save(f / "tokenizer.json"), lambda f: len(mtf.BytePairs.load(f / "tokenizer.json"))
    ),
    "history": Writer(history, lambda f: [r["step"] for r in read_history(f / "history.jsonl")]),
}


def forked(write: Callable[[Path, int], Any], folder: Path, n: int, kill_at: int) -> tuple[bool, int]:
    """Whether the process was killed; how many calls it came to."""
    counted, reads = 0, os.pipe()
    pid = os.fork()
    if not pid:

        def changing(call: str, path: str) -> None:
            nonlocal counted
            counted += 1
            if counted == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

        status = 1
        try:
            files.changing = changing
            write(folder, n)
            os.write(reads[1], str(counted).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(reads[1])
    _, status = os.waitpid(pid, 0)
    told = os.read(reads[0], 20)
    os.close(reads[0])
    assert status in (0, signal.SIGKILL), status
    return status != 0, int(told or 0)


def tried(writer: Writer, base: Path, every: int) -> tuple[int, int]:
    """Kill a writer at each call; how many times, and how often the old content was found."""
    shutil.rmtree(base, ignore_errors=True)
    whole, place = base / "whole", base / "place"
    clean = {}
    for n in (0, 1, 2):
        (base / str(n)).mkdir(parents=True)
        writer.write(base / str(n), 0)
        writer.write(base / str(n), n)
        clean[n] = sorted(p.name for p in (base / str(n)).iterdir())
    shutil.copytree(base / "0", whole)
    old, new, next_one = (writer.read(base / str(n)) for n in (0, 1, 2))
    kills, found_old, at = 0, 0, 1
    while True:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        killed, _ = forked(writer.write, place, 1, at)
        found = writer.read(place)
        assert found in (old, new), (at, found)
        if not killed:
            assert found == new
            return kills, found_old
        kills, found_old = kills + 1, found_old + (found == old)
        writer.write(place, 2)
        assert writer.read(place) == next_one, at
        left = sorted(p.name for p in place.iterdir())
        assert left == clean[2], (at, left, clean[2])
        at += every


def main(base: Path, every: int, names: list[str]) -> None:
    """Some writers, or all."""
    os.fsync = lambda descriptor: None  # what a killed process wrote stays, on the disk or on its way there
    total = 0
    for name in names or WRITERS:
        kills, found_old = tried(WRITERS[name], base / "torn", every)
        assert every > 1 or 0 < found_old < kills, (name, kills, found_old)
        print(json.dumps({"writer": name, "kills": kills, "old": found_old, "new": kills - found_old}), flush=True)
        total += kills
    print(json.dumps({"kills": total}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
