"""Models in plain JAX, and from libraries: losses and gradients equal JAX's under several meshes."""

from __future__ import annotations

import pytest

from tests.effort import deep, some
from tests.jax.importing import further_models, libraries, models
from tests.jax.importing.checks import compared

PLAIN = {**models.PLAIN, **further_models.FURTHER}


@pytest.mark.parametrize("name", some([*PLAIN], ["plain_llama"]))
def test_plain(name):
    fn, args, names, layouts = PLAIN[name]()
    compared(fn, *args, names=names, layouts=layouts)


# Haliax, of which a preview alone goes with this JAX, uses what JAX and Equinox will no longer have.
@pytest.mark.parametrize("name", libraries.LIBRARIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`equinox.static_field` is deprecated:UserWarning")
def test_library(name):
    needed, make = libraries.LIBRARIES[name]
    for module in needed:
        pytest.importorskip(module, reason=f"needs {module}", exc_type=ImportError)
    fn, args, names, layouts = make()
    compared(fn, *args, names=names, layouts=some(layouts, layouts[:1]), gradients=deep())
