"""The collectives that a TPU compiler makes of a gather and a reduce-scatter over all chips; run by hand: python
tests/benchmarks/torus_gathers.py --topology v5p:4x4x4

Compiles `jax.lax.all_gather` and `psum_scatter` of bfloat16 blocks ahead of time (no device is needed, but JAX with
libtpu is) and prints the opcodes of what sends and of what surrounds it. Over a torus of three axes that wrap, both are
an all-reduce: of each block written into zeros, or of all blocks, of which a device keeps one.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after PYTHONPATH, which may name another checkout

from meshlib.jax.compiling.topologies import ENVIRONMENT

os.environ.update({**ENVIRONMENT, **os.environ})

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS = 4096
SHOWN = r" (all-gather|all-reduce|reduce-scatter|broadcast|dynamic-update-slice|dynamic-slice)(?:-start)?\("


def compiled(topology: str, gathers: bool) -> str:
    """The text of a program that gathers blocks of rows, or scatters their sum."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    placed = mesh_utils.create_device_mesh((len(devices),), devices, allow_split_physical_axes=True)
    mesh = Mesh(placed, ("chips",))

    def sent(x: Any) -> Any:
        if gathers:
            return jax.lax.all_gather(x, "chips", tiled=True)
        return jax.lax.psum_scatter(x, "chips", tiled=True)

    specs = (P("chips"), P()) if gathers else (P(), P("chips"))
    step = jax.shard_map(sent, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    x = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, sharding=NamedSharding(mesh, specs[0]))
    text: str = jax.jit(step).lower(x).compile().as_text()
    return text


def main() -> None:
    """Print both for one topology."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", default="v5p:4x4x4", help="as of jax.experimental.topologies")
    topology = parser.parse_args().topology
    for gathers in (True, False):
        opcodes = dict.fromkeys(re.findall(SHOWN, compiled(topology, gathers)))
        print(f"{topology}, {'all_gather' if gathers else 'psum_scatter'}: {', '.join(opcodes)}", flush=True)


if __name__ == "__main__":
    main()
