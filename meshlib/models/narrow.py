"""Quantisation of trained kernels for `Numerics(kernel_dtype=...)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshlib.core.arguments import at
from meshlib.core.errors import GraphError
from meshlib.program.records import Program

Array = np.ndarray[Any, Any]
_SCALE = "_scale"


def quantized_kernels(state: Mapping[str, Any], program: Program) -> dict[str, Any]:
    """`state` with kernels quantised to the types that `program` stores, and their scales.

    scale[c] = max over r of |w[r, c]| / m and q[r, c] the nearest number of the type to w[r, c] / scale[c], where r are
    the contracted dims, as in `mtf.quantize`. Kernels that are already quantised are unchanged.

    Args:
      state: arrays by name, such as the state of a training simulation.
      program: the lowered program of a model with `Numerics(kernel_dtype=...)`.
    Raises: GraphError for a kernel of another shape.
    Example:
      >>> import meshlib as mtf
      >>> tiny = mtf.models.preset("llama2-7b").reduced()
      >>> narrow = tiny.replace(numerics=mtf.Numerics(kernel_dtype="int8"))
      >>> with mtf.Graph():
      ...     wide = mtf.lower(*mtf.models.train_step(tiny, batch=2, length=8))
      >>> with mtf.Graph():
      ...     program = mtf.lower(*mtf.models.decode_step(narrow, batch=2, cache_length=8))
      >>> state = mtf.models.quantized_kernels(mtf.simulate(wide).state, program)
      >>> {a.dtype.name for name, a in state.items() if name.endswith("wi/kernel")}
      {'int8'}
    """
    narrow_state = dict(state)
    for name, v in program.variables.items():
        if not name.endswith(_SCALE) or name in state:
            continue
        of = name.removesuffix(_SCALE)
        kernel = program.variables.get(of)
        if kernel is None or of not in state or kernel.tensor.dtype.computes:
            continue
        shape, w = kernel.tensor.shape, np.asarray(state[of], np.float32)
        if w.shape != shape.sizes:
            raise GraphError(f"{at('quantized_kernels')}: '{of}' has shape {list(w.shape)}, the program has {shape}")
        summed = tuple(n for n, d in enumerate(shape) if d not in v.tensor.shape)
        dtype = kernel.tensor.dtype
        largest = np.abs(w).max(axis=summed, keepdims=True)
        scale = np.where(largest > 0, largest / dtype.largest, 1.0).astype(np.float32)
        units = w / scale
        narrow_state[of] = units if dtype.is_float else np.rint(units).astype(np.int8)
        narrow_state[name] = np.squeeze(scale, summed)
    return narrow_state
