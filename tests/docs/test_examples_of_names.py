"""Public functions and classes have docstrings with an example, which runs as a doctest."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import hardware
import layouts
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


FOLDERS = [name for name in mtf.__all__ if (Path(mtf.__file__).parent / name).is_dir()]
ROOMS = [mtf, hardware, layouts, *(import_module(f"meshlib.{name}") for name in FOLDERS)]


@pytest.mark.parametrize("module", ROOMS, ids=lambda module: module.__name__)
def test_classes_have_a_docstring_with_an_example(module: ModuleType) -> None:
    names = getattr(module, "__all__", None) or {*vars(module), *getattr(module, "NAMES", ())}
    if module is mtf.jax:
        pytest.importorskip("jax")
    public = {name: getattr(module, name) for name in names if not name.startswith("_")}
    classes = {name: value for name, value in public.items() if inspect.isclass(value)}
    own = {
        name: c for name, c in classes.items() if c.__module__.partition(".")[0] in ("meshlib", "hardware", "layouts")
    }
    assert {name for name, c in own.items() if ">>>" not in (c.__doc__ or "")} == set()
