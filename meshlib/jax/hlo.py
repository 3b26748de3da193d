"""The collectives of a compiled module, read off its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\(")
_SHAPE = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]+)\}|\[(\d+),(\d+)\])")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_USED = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")  # an axis, or so many steps of it
_PAIRS = re.compile(r"source_target_pairs")
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')


def sent_bytes(text: str) -> float:
    """Bytes that a device sends on rings in one run of a compiled module, loops included.

    >>> sent_bytes('''ENTRY %main (p: f32[8]) -> f32[8] {
    ...   %r = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
    ... }''')
    32.0
    """
    return sum(times * _sent(kind, size, group) for kind, size, group, times in collectives(text))


def collectives(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Kind, bytes of the result on one device, devices in a group, and runs, of each collective."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        found = _COMPUTATION.match(line)
        if found:
            current = found[2]
            entry = current if found[1] else entry
        bodies.setdefault(current, []).append(line)

    def of(name: str, times: int) -> Iterator[tuple[str, int, int, int]]:
        for line in bodies.get(name, ())[1:]:
            found = _COLLECTIVE.search(line)
            if found:
                shapes = _SHAPE.findall(found[1])
                if found[3]:  # a start's result holds its operands, too
                    shapes = shapes[len(shapes) // 2 :]
                yield found[2], sum(_bytes(*s) for s in shapes), _group(line), times
                continue
            trips = _TRIPS.search(line)
            for called in _CALLED.findall(line):
                yield from of(called, times * (int(trips[1]) if trips else 1))

    yield from of(entry, 1)


def _sent(kind: str, size: int, group: int) -> float:
    match kind:
        case "all-reduce":
            return 2 * (group - 1) / group * size
        case "reduce-scatter":
            return float((group - 1) * size)
        case "collective-permute":
            return float(size)
    return (group - 1) / group * size


def _bytes(dtype: str, sizes: str) -> int:
    digits = re.search(r"\d+", dtype)
    bits = 8 if dtype == "pred" or digits is None else int(digits[0])
    return prod(int(n) for n in sizes.split(",") if n) * bits // 8


def _group(line: str) -> int:
    """Devices in a group. Raises ValueError for a notation that is not known here, instead of counting nothing."""
    found = _GROUPS.search(line)
    if found is not None:
        return len(found[1].split(",")) if found[1] else int(found[3])
    named = _MESH.search(line)
    if named is not None:
        sizes = {axis: int(n) for axis, n in _AXIS.findall(named[1])}
        return prod(int(part) if part else sizes[axis] for axis, part in _USED.findall(named[2]))
    if _PAIRS.search(line):
        return 1
    raise ValueError(f"no replica groups in {line.strip()[:200]}")


_MADE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CALLS = re.compile(r"\bcalls=%?([\w.\-]+)")
_AROUND = re.compile(r" (?:while|conditional)\(")  # what they run is timed by itself


def module_name(text: str) -> str:
    """Of a compiled module.

    >>> module_name("HloModule jit_step, is_scheduled=true")
    'jit_step'
    """
    found = re.match(r"HloModule ([\w.\-]+)", text)
    return found[1] if found else ""


def scopes(text: str) -> dict[str, str]:
    """Instruction of a compiled module -> the path of named scopes that it comes from; of a fusion its root's, else
    that of something in it; loops are left out.

    >>> scopes('''HloModule m
    ... ENTRY %main (p: f32[8]) -> f32[8] {
    ...   %p = f32[8]{0} parameter(0)
    ...   ROOT %r = f32[8]{0} negate(%p), metadata={op_name="jit(f)/model/neg"}
    ... }''')
    {'p': '', 'r': 'jit(f)/model/neg'}
    """
    found: dict[str, str] = {}
    inside: dict[str, str] = {}  # computation -> the path of its last instruction that has one
    calls: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            current = begins[2]
            continue
        made = _MADE.match(line)
        if made is None or _AROUND.search(line):
            continue
        scope = _SCOPE.search(line)
        found[made[1]] = scope[1] if scope else ""
        if scope:
            inside[current] = scope[1]
        called = _CALLS.search(line)
        if called:
            calls[made[1]] = called[1]
    for name, called_name in calls.items():
        found[name] = found[name] or inside.get(called_name, "")
    return found
