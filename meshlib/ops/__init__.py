"""The operations of the language; each is one record (see `meshlib.core.opdef`) and the function that builds it."""

from meshlib.ops.pointwise import elementwise as _elementwise  # noqa: F401 (gives tensors their operators: x + y, -x)
