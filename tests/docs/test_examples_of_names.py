"""Public functions have docstrings with an example, which runs as a doctest."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import meshlib as mtf

# Functions whose docstring refers to another's for an example: the same in one, two and three dims, or in blocks.
WITHOUT = {
    "conv1d", "conv1d_transpose", "conv3d", "conv3d_transpose", "conv2d_with_blocks", "conv3d_with_blocks",
    "conv2d_transpose_with_blocks", "conv3d_transpose_with_blocks",
    "halo_exchange", "left_halo_exchange", "image_attention", "latent_memory",
    "latent_queries", "masked_local_attention_1d", "conditional_batch_norm", "averaged", "load", "load_model",
    "texts_in_rows",
}  # fmt: skip


@pytest.mark.parametrize("module", [mtf, mtf.layers, mtf.optimize], ids=lambda module: module.__name__)
def test_functions_have_a_docstring_with_an_example(module: ModuleType) -> None:
    functions = {name: getattr(module, name) for name in module.__all__}
    functions = {name: f for name, f in functions.items() if callable(f) and not inspect.isclass(f)}
    assert len(functions) > 10
    docs = {name: inspect.getdoc(function) or "" for name, function in functions.items()}
    assert [name for name, doc in docs.items() if not doc] == []
    assert {name for name, doc in docs.items() if ">>>" not in doc} - WITHOUT == set()
