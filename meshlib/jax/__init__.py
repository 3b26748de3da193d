"""JAX: programs on its devices (`mtf.on_jax`), its functions as programs (`mtf.from_jax`). Imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from meshlib.core.errors import MissingError

if TYPE_CHECKING:
    from meshlib.jax.compiling import compile_for as compile_for
    from meshlib.jax.compiling.result import Compiled as Compiled
    from meshlib.jax.explaining import Explained as Explained
    from meshlib.jax.explaining import explain as explain
    from meshlib.jax.importing import from_jax as from_jax
    from meshlib.jax.measuring import measure_chip as measure_chip
    from meshlib.jax.running import OnJax as OnJax
    from meshlib.jax.running import on_jax as on_jax
    from meshlib.jax.specs import partition_specs as partition_specs
    from meshlib.jax.table import row as row

# Public name -> module of this package that defines it.
NAMES = {
    "Compiled": "compiling.result",
    "Explained": "explaining",
    "OnJax": "running",
    "compile_for": "compiling",
    "explain": "explaining",
    "from_jax": "importing",
    "measure_chip": "measuring",
    "on_jax": "running",
    "partition_specs": "specs",
    "row": "table",
}
PUBLIC = (
    "Compiled",
    "OnJax",
    "compile_for",
    "from_jax",
    "measure_chip",
    "on_jax",
    "partition_specs",
)  # names of `meshlib` itself


def __dir__() -> list[str]:
    return [*NAMES]


if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in NAMES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        try:
            return getattr(import_module(f"{__name__}.{NAMES[name]}"), name)
        except ModuleNotFoundError as fault:
            if (fault.name or "").partition(".")[0] not in ("jax", "jaxlib"):
                raise
            raise MissingError(f"{name} needs JAX, which is not installed: pip install 'meshlib-tpu[jax]'") from None
