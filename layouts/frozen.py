"""Small immutable value types.

They are dictionary keys in hot loops. A frozen dataclass would compute its hash at every lookup; these classes
compute it once, which needs hand-written `__init__`s; this base enforces immutability. Equal objects of `Interned`
classes are identical, so that lookups neither hash nor compare contents.
"""

from __future__ import annotations

from threading import RLock
from typing import Any, NoReturn
from weakref import WeakValueDictionary


class Frozen:
    """A base whose attributes can only be set by `_fill`; objects from equal arguments are equal.

    >>> Frozen().x = 1
    Traceback (most recent call last):
    AttributeError: Frozen is immutable; it has no settable attribute 'x'
    """

    __slots__ = ("_hash", "_key")

    _key: tuple[Any, ...]
    _hash: int

    def _fill(self, *key: object, **attributes: object) -> None:
        """Set the attributes; `key` are the checked arguments, which determine equality."""
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
        return type(self), self._key  # hashes of str differ between processes

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; it has no settable attribute {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable; {name!r} cannot be deleted")


_LOCK = RLock()  # re-entrant: a garbage collection while it is held may construct further objects


class _InternedMeta(type):
    """The metaclass of `Interned`: a call returns the existing object for an equal key."""

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        cls._objects: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        new = super().__call__(*args, **kwargs)
        with _LOCK:
            return cls._objects.setdefault(new._key, new)


class Interned(Frozen, metaclass=_InternedMeta):
    """A base whose equal objects are identical, compared and hashed by identity."""

    __slots__ = ("__weakref__",)

    __hash__ = object.__hash__
    __eq__ = object.__eq__
