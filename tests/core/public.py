"""The public names of a package: what its `__init__` imports as `x as x`."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def public_names(package: ModuleType) -> list[str]:
    """In the order of the file, lazily imported ones included. Underscored names are the package's own.

    Without JAX, what needs it is left out.
    """
    tree = ast.parse(Path(package.__file__ or "").read_text())
    listed = [*tree.body, *(node for block in tree.body if isinstance(block, ast.If) for node in block.body)]
    statements = [node for node in listed if isinstance(node, ast.Import | ast.ImportFrom)]
    if find_spec("jax") is None:
        statements = [node for node in statements if getattr(node, "module", "") != "meshlib.jax"]
    imported = [a for node in statements for a in node.names]
    shown = [a.asname or a.name for a in imported if not (a.asname or a.name).startswith("_")]
    assert [a.name for a in imported if not (a.asname or "").startswith("_")] == shown, (
        "say `import x as x`, or `as _x`"
    )
    assert len(set(shown)) == len(shown), "a name is listed once"
    return shown
