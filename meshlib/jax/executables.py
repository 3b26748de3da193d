"""Compiled steps as files: written where the compiler is, loaded where the devices are."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, NoReturn

from meshlib.core.canonical_keys import key_of
from meshlib.core.documents import RECORD, TEXT, Schema, parse_json
from meshlib.core.errors import ProgramError
from meshlib.core.files import open_file, replace_file
from meshlib.program.instructions import Compute, Loop
from meshlib.program.records import Program

MAGIC = b"meshlib compiled step 2\n"
MOST_HEAD_BYTES = 2**16
HEAD: Schema = {**dict.fromkeys(("program", "mesh", "slice", "device_kind", "sha256"), TEXT), "versions": RECORD}


def jax_versions() -> dict[str, str]:
    """The versions that an executable depends on."""
    return {name: version(name) for name in ("jax", "jaxlib")}


def fingerprint(program: Program) -> str:
    """Canonical key of a program: its instructions, and the computations of their operations."""
    return key_of("compiled step", str(program), program.precision, list(_computed(program)))


def _computed(program: Program) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and attributes of every operation that a step computes, in order; initializers are excluded."""
    for instruction in program.instructions:
        if isinstance(instruction, Loop):
            yield from _computed(instruction.body)
        elif isinstance(instruction, Compute):
            yield instruction.operation.opdef.name, dict(instruction.operation.attrs)


def write_executable(path: str | os.PathLike[str], compiled: Any) -> None:
    """Write the executable of a `Compiled` atomically, after a JSON line that identifies it.

    Raises: ProgramError for a file that can't be written.
    """
    head = {
        "program": fingerprint(compiled.program),
        "mesh": str(compiled.program.mesh),
        "slice": compiled.slice.name,
        "device_kind": compiled.device_kind,
        "versions": compiled.versions,
        "sha256": hashlib.sha256(compiled.executable).hexdigest(),
    }
    content = MAGIC + json.dumps(head).encode() + b"\n" + compiled.executable
    replace_file(path, lambda file: file.write(content), "save", ProgramError)


def read_executable(
    path: str | os.PathLike[str], program: Program, device_kind: str, versions: dict[str, str]
) -> bytes:
    """Read an executable from a file, after checking that it fits the program, the devices and this JAX.

    Raises: ProgramError, with both sides of what differs.
    """
    with open_file(path, "on_jax", ProgramError) as (file, target):

        def fail(fault: str) -> NoReturn:
            raise ProgramError(
                f"on_jax: {target} is not a whole file of a compiled step: {fault}; write it with "
                "mtf.compile_for(...).save"
            ) from None

        if file.read(len(MAGIC)) != MAGIC:
            fail(f"it does not begin with {MAGIC.decode().strip()!r}")
        about = parse_json(file.readline(MOST_HEAD_BYTES), fail, HEAD)
        body = file.read()
    if (digest := hashlib.sha256(body).hexdigest()) != about["sha256"]:
        fail(f"its {len(body):,} bytes have the SHA-256 {digest[:16]}, those written had {about['sha256']:.16}")
    if about["program"] != fingerprint(program):
        raise ProgramError(
            f"on_jax: {target} is the step of another program (mesh {about['mesh']:.80}, slice {about['slice']:.80}); "
            "compile this one, with the same sizes, layout and library"
        )
    if about["device_kind"] != device_kind:
        raise ProgramError(
            f"on_jax: {target} is compiled for {about['device_kind']:.80} devices, but these are {device_kind}"
        )
    theirs = {k: str(v)[:40] for k, v in about["versions"].items() if k in versions}
    if theirs != versions:
        raise ProgramError(f"on_jax: {target} is compiled by {_text(theirs)}, but this is {_text(versions)}")
    return body


def _text(versions: dict[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(versions.items()))
