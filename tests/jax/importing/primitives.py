"""`python -m tests.jax.importing.primitives`: the primitives of the installed JAX that `from_jax` does not import."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import jax
from jax.extend.core import Primitive

from meshlib.jax.importing import expansions, pairs, tracing
from meshlib.jax.importing.kernels import KINDS
from meshlib.jax.importing.rewrites import REWRITES, mapped
from meshlib.jax.importing.table import RULES

FURTHER = ("ad_util", "core", "dispatch", "pjit", "random")  # modules beside jax._src.lax
HERE = {"scan", "cond", "platform_index", "zeros_like"}  # methods of the tracing


def primitives() -> dict[str, str]:
    """The names of JAX's primitives for programs, with the module that defines each."""
    lax = importlib.import_module("jax._src.lax")
    modules = [f"jax._src.lax.{m.name}" for m in pkgutil.iter_modules(lax.__path__)]
    named = {}
    for module in [*modules, *(f"jax._src.{name}" for name in FURTHER)]:
        for value in vars(importlib.import_module(module)).values():
            if isinstance(value, Primitive):
                named.setdefault(value.name, module.rpartition(".")[2])
    return named


def imported() -> set[str]:
    """The names that the importer has a rule, a rewrite or a table entry for; kernels need a function of the user's."""
    tables = {*RULES, *REWRITES, *tracing._CALLS, *tracing._CHECKPOINTS, *pairs._RULES, *expansions._EXPANSIONS, *HERE}
    # Collectives inside `shard_map`, by their names in the module that maps its body.
    source = Path(mapped.__file__).read_text()
    return {name.removeprefix("complex ") for name in tables} | {*KINDS} | set(re.findall(r'"(\w+)"', source))


def main() -> None:
    every, known = primitives(), imported()
    missing = {name: module for name, module in every.items() if name not in known}
    print(f"JAX {jax.__version__}: {len(every) - len(missing)} of {len(every)} primitives are imported. Not imported:")
    for module in sorted(set(missing.values())):
        print(f"{module}: {', '.join(sorted(name for name, of in missing.items() if of == module))}")


if __name__ == "__main__":
    main()
