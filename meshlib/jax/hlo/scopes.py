"""The named scope of each instruction of a compiled module."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_MADE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_AROUND = re.compile(r" (?:while|conditional)\(")  # instructions in their bodies are timed separately


def module_name(text: str) -> str:
    """Name of a compiled module.

    >>> module_name("HloModule jit_step, is_scheduled=true")
    'jit_step'
    """
    match = re.match(r"HloModule ([\w.\-]+)", text)
    return match[1] if match else ""


def scopes(text: str) -> dict[str, str]:
    """Instruction -> its path of named scopes; for a fusion that of its root or any member; loops are left out.

    >>> scopes('''HloModule m
    ... ENTRY %main (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %r = f32[8]{0} negate(%p), metadata={op_name="jit(f)/model/neg"}
    ... }''')
    {'p': '', 'r': 'jit(f)/model/neg'}
    """
    scope_of: dict[str, str] = {}
    inside: dict[str, str] = {}  # computation -> path of its last instruction that has one
    calls: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            current = begins[2]
            continue
        definition = _MADE.match(line)
        if definition is None or _AROUND.search(line):
            continue
        scope = _SCOPE.search(line)
        scope_of[definition[1]] = scope[1] if scope else ""
        if scope:
            inside[current] = scope[1]
        called = _CALLS.search(line)
        if called:
            calls[definition[1]] = called[1]
    for name, called_name in calls.items():
        scope_of[name] = scope_of[name] or inside.get(called_name, "")
    return scope_of


def scope_in(path: str, known: Mapping[str, object]) -> str | None:
    """The innermost scope in the path among those that JAX preserves.

    >>> known = dict.fromkeys(["layers/scan/add", "add", "all_reduce:add"])
    >>> scope_in("jit(f)/shard_map/layers/scan/add/while/body/all_reduce:add/psum", known)
    'all_reduce:add'
    >>> scope_in("jit(f)/shard_map/layers/scan/add/reshape;add/mul", known)  # of two operations that became one
    'layers/scan/add'
    """
    parts = path.partition(";")[0].split("/")[:-1]  # the last part is JAX's primitive
    scope, begin = None, 0
    while begin < len(parts):
        fits = (end for end in range(len(parts), begin, -1) if "/".join(parts[begin:end]) in known)
        end = next(fits, None)
        if end is not None:
            scope = "/".join(parts[begin:end])
        begin = end if end is not None else begin + 1
    return scope
