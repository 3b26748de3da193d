"""FLOPs of the matrix products of a compiled module, and the TPU compiler's expected cycles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

import numpy as np

from meshlib.jax.hlo.text import Array, Computation, HloInstruction, Module
from meshlib.jax.hlo.walk import walk

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_KERNELS = ("tpu_custom_call", "mosaic")  # custom kernels, whose work the text does not show


@dataclass(frozen=True)
class CompiledWork:
    """Work of one device per run.

    flops    of products and convolutions, two for each multiplication and addition; exact, loops by their trips
    cycles   that the compiler expects of everything, 0 where it says nothing
    kernels  custom kernels that run, whose FLOPs are not in `flops`
    """

    flops: int
    cycles: int
    kernels: int


def work_of(module: Module) -> CompiledWork:
    """The work of a module; loops whose trips depend on data count once."""
    flops = cycles = kernels = 0
    for frame, i, times, _ in walk(module):
        runs = 1 if times is None else times
        if i.opcode == "dot":
            flops += runs * _dot(frame.holder, i)
        elif i.opcode == "convolution":
            flops += runs * _convolution(frame.holder, i)
        elif i.opcode == "custom-call":
            target = _TARGET.search(i.attributes)
            kernels += runs * (target is not None and any(k in target[1] for k in _KERNELS))
        if not frame.is_fused and (expected := _CYCLES.search(i.attributes)):
            cycles += runs * int(expected[1])
    return CompiledWork(flops, cycles, kernels)


def _array(holder: Computation, name: str) -> Array:
    return holder.instructions[name].arrays[0]


def _numbers(i: HloInstruction, attribute: str) -> list[int]:
    match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", i.attributes)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _dot(holder: Computation, i: HloInstruction) -> int:
    left = _array(holder, i.operands[0]).sizes
    return 2 * prod(i.arrays[0].sizes) * prod(left[n] for n in _numbers(i, "lhs_contracting_dims"))


def _convolution(holder: Computation, i: HloInstruction) -> int:
    """FLOPs of a convolution, without multiplications by padding or dilation zeros."""
    labels = _LABELS.search(i.attributes)
    if labels is None:
        return 0
    arrays = (_array(holder, i.operands[0]), _array(holder, i.operands[1]), i.arrays[0])
    left, right, out = (
        dict(zip(str(text), a.sizes, strict=True)) for text, a in zip(labels.groups(), arrays, strict=True)
    )
    window = _window(i)
    counts: int = 1
    for n in range(len(left) - 2):
        d = str(n)
        counts *= _meetings(left[d], right[d], out[d], {k: v[n] for k, v in window.items() if n < len(v)})
    groups, batches = (_count(i, name) for name in ("feature_group_count", "batch_group_count"))
    return 2 * (left["f"] // groups) * out["f"] * (left["b"] // batches) * counts


def _count(i: HloInstruction, attribute: str) -> int:
    match = re.search(rf"\b{attribute}=(\d+)", i.attributes)
    return int(match[1]) if match else 1


def _window(i: HloInstruction) -> dict[str, list[tuple[int, ...]]]:
    match = _WINDOW.search(i.attributes)
    fields = dict(part.split("=", 1) for part in match[1].split() if "=" in part) if match else {}
    return {
        name: [tuple(int(n) for n in dim.split("_")) for dim in re.split(r"(?<=\d)x", text)]
        for name, text in fields.items()
    }


def _meetings(size: int, kernel: int, out: int, window: dict[str, tuple[int, ...]]) -> int:
    """(output, kernel) position pairs along one spatial dim that read an element of the input."""
    stride, before = window.get("stride", (1,))[0], window.get("pad", (0, 0))[0]
    holes, gaps = window.get("rhs_dilate", (1,))[0], window.get("lhs_dilate", (1,))[0]
    starts = np.arange(out, dtype=np.int64) * stride - before
    total = 0
    for k in range(kernel):
        at = starts + k * holes
        total += int(((at >= 0) & (at < (size - 1) * gaps + 1) & (at % gaps == 0)).sum())
    return total
