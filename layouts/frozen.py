"""Immutable small value types.

They are keys of dictionaries in hot loops. A frozen dataclass would compute its hash at every look-up;
these classes compute it once, which needs hand-written `__init__`s, and this base keeps them honest.
"""

from __future__ import annotations

from typing import Any, NoReturn


class Frozen:
    """A base whose attributes can only be set by `_fill`; what is made of equal arguments is equal.

    >>> Frozen().x = 1
    Traceback (most recent call last):
    AttributeError: Frozen is immutable; it has no settable attribute 'x'
    """

    __slots__ = ("_hash", "_key")

    _key: tuple[Any, ...]
    _hash: int

    def _fill(self, *key: object, **attributes: object) -> None:
        """Set the attributes; `key` are the arguments, as checked, that make an equal object."""
        fill = object.__setattr__
        for name, value in attributes.items():
            fill(self, name, value)
        fill(self, "_key", key)
        fill(self, "_hash", hash(key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        return self._hash == other._hash and self._key == other._key

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self._key  # the hash of a str is another in another process

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; it has no settable attribute {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; {name!r} cannot be deleted")
