"""Names of operations in listings, and of dims that the library creates."""

from __future__ import annotations

from collections.abc import Container


def free_name(name: str, taken: Container[object]) -> str:
    """`name`, with as many underscores behind it as it takes to be none of those `taken`."""
    while name in taken:
        name += "_"
    return name


def relative_name(name: str, scope: str) -> str:
    """`name` without the scopes that it begins with as `scope` does.

    >>> relative_name("layers/attention/q/kernel", "layers/scan")
    'attention/q/kernel'
    """
    parts = name.split("/")
    for shared in scope.split("/"):
        if len(parts) == 1 or parts[0] != shared:
            break
        parts = parts[1:]
    return "/".join(parts)
