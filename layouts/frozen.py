"""Immutability for the small value types of this floor.

They are keys of dictionaries in hot loops. A frozen dataclass would compute its hash at every look-up;
these classes compute it once, which needs hand-written `__init__`s, and this base keeps them honest.
"""

from __future__ import annotations

from typing import NoReturn


class Frozen:
    """A base without fields whose attributes can only be set through `object.__setattr__`.

    >>> Frozen().x = 1
    Traceback (most recent call last):
    AttributeError: Frozen is immutable; it has no settable attribute 'x'
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; it has no settable attribute {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; {name!r} cannot be deleted")
