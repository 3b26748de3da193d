"""Some fifty small models from the libraries that people use: losses and gradients equal JAX's under three layouts."""

from __future__ import annotations

import pytest

from tests.effort import some
from tests.jax.importing import small_libraries, small_modules, small_steps
from tests.jax.importing.checks import compared
from tests.jax.importing.small_models import LAYOUTS, MODELS

pytest.importorskip("jax")
BY_DEFAULT = ["experts_by_grouped_products", "nnx_stacked"]


# Haliax, of which a preview alone goes with this JAX, uses what JAX and Equinox will no longer have.
@pytest.mark.parametrize("name", some([*MODELS], BY_DEFAULT))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`equinox.static_field` is deprecated:UserWarning")
def test_small_model(name: str) -> None:
    row = MODELS[name]
    for module in row.needs:
        pytest.importorskip(module, reason=f"needs {module}", exc_type=ImportError)
    loss, args = row.make()
    compared(loss, *args, names=row.names, layouts=LAYOUTS)


def test_there_are_enough_of_each_library() -> None:
    assert len(MODELS) >= 50
    assert small_steps.OPTIMIZERS.keys() <= {n.removeprefix("optax_") for n in MODELS}
    assert {n.partition("_")[0] for n in MODELS} >= {"linen", "nnx", "equinox", "haliax", "optax"}
    assert small_modules.IMAGES.ndim == 4
    modules = {row.make.__module__ for row in MODELS.values()}
    assert small_libraries.__name__ in modules
