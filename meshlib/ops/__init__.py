"""The operations of the language; each is one record (see `meshlib.core.opdef`) and the function that builds it."""

from meshlib.ops.pointwise import operators as _operators  # noqa: F401 (gives tensors their operators: x + y, -x)
