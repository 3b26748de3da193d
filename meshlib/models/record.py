"""The base of all model configs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from layouts.checking import some
from meshlib.core.arguments import at, whole
from meshlib.core.errors import GraphError, nearest


@dataclass(frozen=True)
class Config:
    """A frozen record with the configuration of a model."""

    def __new__(cls, *values: object, **given: object) -> Self:
        """A config; an unknown field is an error with the nearest name."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                hint = nearest(name, known) or f"; there are {some(known, 20)}"
                raise GraphError(f"{at(cls.__name__)}: no field {name!r}{hint}")
        return super().__new__(cls)

    @classmethod
    def checked(cls, value: object, what: str) -> Self:
        """`value`, which must be a config of this class. Raises: GraphError otherwise."""
        if isinstance(value, cls):
            return value
        raise GraphError(f"{at(what)}: expected a {cls.__name__}, got {type(value).__name__} {value!r:.80}")

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some fields.

        >>> import meshlib as mtf
        >>> mtf.models.preset("gpt2").replace(vocab=50304).vocab
        50304
        """
        return replace(self, **changes)

    def not_positive(self, *names: str) -> list[str]:
        """The sizes below 1 among these fields, for an error. Raises: GraphError for a size that is not an integer."""
        sizes = {name: whole(getattr(self, name), type(self).__name__, name) for name in names}
        return [f"{name}={size}" for name, size in sizes.items() if size < 1]
