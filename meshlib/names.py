"""Names of operations in listings."""

from __future__ import annotations


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
