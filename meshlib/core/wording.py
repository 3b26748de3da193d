"""Arguments and fields in messages as their reader writes them: in Python, or as flags of the command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_flags: ContextVar[Mapping[str, str] | None] = ContextVar("flags", default=None)


@contextmanager
def in_flags(**flags: str) -> Iterator[None]:
    """Messages written inside name flags; `flags` has those that are not called as their argument.

    >>> with in_flags(weight_dtype="--weights"):
    ...     argument("weight_dtype"), argument("fix", "d_ff:model"), setting("d_ff", 512)
    ('--weights', '--fix d_ff:model', '--set d_ff=512')
    """
    token = _flags.set(flags)
    try:
        yield
    finally:
        _flags.reset(token)


def argument(name: str, value: str | None = None) -> str:
    """An argument, with a value if one is given.

    >>> argument("fix"), argument("fix", "d_ff:model")
    ('fix', "fix='d_ff:model'")
    """
    flags = _flags.get()
    if flags is None:
        return name if value is None else f"{name}={value!r}"
    flag = flags.get(name, f"--{name}")
    return flag if value is None else f"{flag} {value}"


def setting(name: str, value: object) -> str:
    """A changed field of a model's config.

    >>> setting("d_ff", 512)
    'config.replace(d_ff=512)'
    """
    return f"config.replace({name}={value})" if _flags.get() is None else f"--set {name}={value}"
