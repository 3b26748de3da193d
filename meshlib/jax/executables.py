"""Compiled steps as files: written where the compiler is, loaded where the devices are."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from meshlib.core.errors import ProgramError
from meshlib.program.records import Program

MAGIC = b"meshlib compiled step 1\n"


def jax_versions() -> dict[str, str]:
    """The versions that an executable depends on."""
    return {name: version(name) for name in ("jax", "jaxlib")}


def fingerprint(program: Program) -> str:
    """A digest of what a program runs: equal programs have equal ones."""
    return hashlib.sha256(str(program).encode()).hexdigest()


def write_executable(path: Path, compiled: Any) -> None:
    """Write the executable of a `Compiled` behind a line of JSON that says what it is for.

    Raises: ProgramError for a file that can't be written.
    """
    head = {
        "program": fingerprint(compiled.program),
        "mesh": str(compiled.program.mesh),
        "slice": compiled.slice.name,
        "device_kind": compiled.device_kind,
        "versions": compiled.versions,
        "bytes": len(compiled.executable),
    }
    try:
        path.write_bytes(MAGIC + json.dumps(head).encode() + b"\n" + compiled.executable)
    except OSError as fault:
        raise ProgramError(f"save: {path} can't be written: {fault}") from None


def read_executable(path: Path, program: Program, device_kind: str, versions: dict[str, str]) -> bytes:
    """The executable in a file, after a look whether it is that of the program, the devices and this JAX.

    Raises: ProgramError, with both sides of what differs.
    """
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise ProgramError(f"on_jax: executable {path} can't be read: {fault}") from None
    head, newline, body = data[len(MAGIC) :].partition(b"\n")
    try:
        about = json.loads(head) if data.startswith(MAGIC) and newline else None
    except ValueError:
        about = None
    if not isinstance(about, dict) or len(body) != about.get("bytes"):
        raise ProgramError(
            f"on_jax: {path} is no whole file of a compiled step; write it with mtf.compile_for(...).save"
        )
    if about["program"] != fingerprint(program):
        raise ProgramError(
            f"on_jax: {path} is the step of another program (mesh {about['mesh']}, slice {about['slice']}); compile "
            "this one, with the same sizes, layout and library"
        )
    if about["device_kind"] != device_kind:
        raise ProgramError(
            f"on_jax: {path} is compiled for {about['device_kind']} devices, but these are {device_kind}"
        )
    theirs = {k: v for k, v in about["versions"].items() if k in versions}
    if theirs != versions:
        raise ProgramError(f"on_jax: {path} is compiled by {_text(theirs)}, but this is {_text(versions)}")
    return body


def _text(versions: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))
