"""The operations of the language; each is one record (see `meshlib.core.opdef`) and the function that builds it."""

from typing import TYPE_CHECKING

from meshlib.ops.pointwise import operators as _operators  # noqa: F401 (gives tensors their operators: x + y, -x)

if not TYPE_CHECKING:

    def __getattr__(name):
        hint = "operations are names of meshlib itself: import meshlib as mtf"
        raise AttributeError(f"module 'meshlib.ops' has no attribute '{name}'; {hint}")
