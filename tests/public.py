"""The public names of a package: what its `__init__` takes in as `x as x`."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def public_names(package: ModuleType) -> list[str]:
    """In the order of the file. Underscored names are its own; any other import would be public by accident."""
    tree = ast.parse(Path(package.__file__ or "").read_text())
    imported = [a for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) for a in node.names]
    shown = [a.asname or a.name for a in imported if not (a.asname or a.name).startswith("_")]
    assert [a.name for a in imported if not (a.asname or "").startswith("_")] == shown, (
        "say `import x as x`, or `as _x`"
    )
    assert len(set(shown)) == len(shown), "a name is listed once"
    return shown
