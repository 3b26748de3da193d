"""What examples in docstrings use without importing it, as those of NumPy and JAX: `mtf` and `np`."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def imported_names(doctest_namespace: dict[str, object]) -> None:
    """Bind the names in which all examples are written."""
    import numpy

    import meshlib

    doctest_namespace.update(mtf=meshlib, np=numpy)
