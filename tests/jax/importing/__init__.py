"""Tests of what comes from JAX; skipped as a whole where JAX is not installed."""

import pytest

pytest.importorskip("jax", reason="needs JAX: pip install -e '.[jax]'")
