"""Names of operations in listings, and of dims created by the library."""

from __future__ import annotations

from collections.abc import Container


def free_name(name: str, taken: Container[object]) -> str:
    """`name` with as many underscores appended as it takes to differ from all of `taken`."""
    while name in taken:
        name += "_"
    return name


def relative_name(name: str, scope: str) -> str:
    """`name` without the leading scopes that it shares with `scope`.

    >>> relative_name("layers/attention/q/kernel", "layers/scan")
    'attention/q/kernel'
    """
    parts = name.split("/")
    for shared in scope.split("/"):
        if len(parts) == 1 or parts[0] != shared:
            break
        parts = parts[1:]
    return "/".join(parts)
