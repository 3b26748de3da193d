"""The checkpoints of a run in one folder: the last few, and the best. Each is one file that is whole or not there."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from meshlib.checkpoint import load, read_notes, save
from meshlib.documents import COUNT, LIST, RECORD, Schema, parse_json
from meshlib.errors import CheckpointError
from meshlib.simulation import Simulation

LOOP: Schema = {
    **dict.fromkeys(("step", "counted", "since_best"), COUNT),
    **dict.fromkeys(("sums", "data"), RECORD),
    "skipped": LIST,
    "best": RECORD.optional(),
    "best_by": LIST.optional(),
}
NOTE = "training"  # beside the variables: where the loop was
BEST = "best.safetensors"
_NAME = re.compile(r"step_([0-9]{9,})\.safetensors")


class Keeper:
    """Writes checkpoints into a folder and keeps the last `keep`; of several processes the first removes the others."""

    def __init__(self, folder: str | os.PathLike[str], keep: int) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise CheckpointError(
                f"train: folder must be the path of one, got {folder!r:.80}; the working directory is '.'"
            )
        self.folder, self.keep = Path(folder), keep
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise CheckpointError(
                f"train: the folder {self.folder} can't be made: {fault.strerror or fault}"
            ) from fault

    def there(self) -> list[Path]:
        """Those in the folder, the oldest first."""
        found = {int(m[1]): p for p in self.folder.iterdir() if (m := _NAME.fullmatch(p.name))}
        return [found[step] for step in sorted(found)]

    def newest(self, run: Simulation) -> dict[str, Any] | None:
        """Give `run` the state of the last one; where the loop was then. None if there is none.

        Raises: CheckpointError for one that is damaged or of another program.
        """
        there = self.there()
        if not there:
            return None
        text = read_notes(there[-1]).get(NOTE)
        if text is None:
            raise CheckpointError(f"train: {there[-1]} was not written by mtf.train; use another folder, or mtf.load")
        load(there[-1], run)

        def fail(fault: str) -> NoReturn:
            raise CheckpointError(
                f"train: the note of {there[-1]} is damaged: {fault}; delete the file to go on from the one before"
            ) from None

        noted: dict[str, Any] = parse_json(text, fail, LOOP, constants=True)
        return noted

    def save(self, run: Simulation, step: int, loop: dict[str, Any]) -> None:
        """Write one, and remove those that are too old."""
        save(run, self.folder / f"step_{step:09d}.safetensors", {NOTE: json.dumps(loop)})
        if run.state.processes is None or run.state.processes.first:
            for path in self.there()[: -self.keep]:
                with suppress(FileNotFoundError):
                    path.unlink()

    def save_best(self, run: Simulation, best: dict[str, Any]) -> None:
        """Write what has done best so far."""
        save(run, self.folder / BEST, {"best": json.dumps(best)})
