"""The operations of the language; each is one record (see `meshlib.operation`) and the function that builds it."""

from meshlib.ops import elementwise as _elementwise  # noqa: F401 (gives tensors their operators: x + y, -x)
