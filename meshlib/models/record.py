"""The base of all model configs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from meshlib.core.arguments import at, whole
from meshlib.core.errors import GraphError, nearest


@dataclass(frozen=True)
class Config:
    """A frozen record of what a model is."""

    def __new__(cls, *values: object, **given: object) -> Self:
        """A config; a field that there is not is said with the nearest one."""
        known = [f.name for f in fields(cls)]
        for name in given:
            if name not in known:
                hint = nearest(name, known) or f"; there are {', '.join(known)}"
                raise GraphError(f"{at(cls.__name__)}: no field {name!r}{hint}")
        return super().__new__(cls)

    @classmethod
    def checked(cls, value: object, what: str) -> Self:
        """`value`, which must be such a config. Raises: GraphError for anything else."""
        if isinstance(value, cls):
            return value
        raise GraphError(f"{at(what)}: expected a {cls.__name__}, got {type(value).__name__} {value!r:.80}")

    def replace(self, **changes: Any) -> Self:
        """The same with other fields.

        >>> import meshlib as mtf
        >>> mtf.models.preset("gpt2").replace(vocab=50304).vocab
        50304
        """
        return replace(self, **changes)

    def not_positive(self, *names: str) -> list[str]:
        """Those of these sizes that are less than 1, for an error. Raises: GraphError for what is no whole number."""
        sizes = {name: whole(getattr(self, name), type(self).__name__, name) for name in names}
        return [f"{name}={size}" for name, size in sizes.items() if size < 1]
