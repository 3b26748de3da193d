"""The file of estimates that `search(resume=...)` reuses.

It contains the canonical keys of all inputs of an estimate, and a checksum of the whole file. A file of another
program, machine, compiler, objective or library version is refused, naming the difference; so is a file whose checksum
does not match, whether edited or corrupt.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from hardware.slices import Slice
from meshlib.core.canonical_keys import key_of, library_key
from meshlib.core.documents import RECORD, check_fields, read_json
from meshlib.core.errors import GraphError
from meshlib.core.files import replace_file
from meshlib.estimation.time.physics import CALIBRATED
from meshlib.searching.programs import Objective, SearchProblem

FORMAT = "meshlib search 2"


def keys_of(problems: Collection[SearchProblem], slices: Sequence[Slice], objective: Objective) -> dict[str, str]:
    """Keys of everything that an estimate depends on, by the name used in messages.

    Raises: GraphError for an objective or an attribute of the program that has no key.
    """
    return {
        "program": key_of("search", [p.key for p in problems]),
        "machine": key_of("search", list(slices)),
        "compiler": key_of("search", CALIBRATED, [p.compiler for p in problems]),
        "objective": objective.key,
        "version of meshlib": library_key(),
    }


class KeptEstimates:
    """The estimates in a file, by `Candidate.identity`; empty if there is no file yet.

    Raises: GraphError for a file that is no search, is damaged, or is of a search with other keys.
    """

    def __init__(self, path: str | os.PathLike[str], keys: Mapping[str, str]) -> None:
        self.path, self.keys = path, dict(keys)
        self.estimates: dict[str, dict[str, Any]] = {}
        if os.path.lexists(path):
            self._read()

    def write(self) -> None:
        """Write all estimates atomically."""
        content = {"format": FORMAT, "keys": self.keys, "estimates": self.estimates}
        text = json.dumps({"sha256": _checksum(content), **content})
        replace_file(self.path, lambda file: file.write(text.encode()), "search", GraphError)

    def _read(self) -> None:
        content, _ = read_json(self.path, "search", GraphError, "a file of estimates; name another", constants=True)
        if content.get("format") != FORMAT:
            raise GraphError(f"search: {self.path} has no estimates in the format {FORMAT!r}; name another file")
        check_fields(content, {"keys": RECORD, "estimates": RECORD}, self._refuse)
        checksum = content.pop("sha256", None)
        if checksum != _checksum(content):
            raise GraphError(
                f"search: {self.path} was changed after it was written: its checksum is {str(checksum)[:16]}, that of "
                f"its content {_checksum(content)[:16]}; delete it, or name another file"
            )
        other = [name for name, key in self.keys.items() if content["keys"].get(name) != key]
        if other:
            raise GraphError(
                f"search: {self.path} has the estimates of another {' and '.join(other)}; name another file"
            )
        self.estimates = content["estimates"]

    def _refuse(self, fault: str) -> NoReturn:
        raise GraphError(f"search: {self.path} is not a file of estimates: {fault}; name another file")


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
