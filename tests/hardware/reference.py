"""Reference values: what every checkout holds in `data`, and larger files kept beside the repository.

Tests of the first always run; tests that need one of the second are skipped, with the reason, where it is absent.
"""

import json
from pathlib import Path

import pytest

from tests.paths import SHARED

DATA = Path(__file__).resolve().parent / "data"
FOLDER = SHARED / "reference"


def held(name):
    """The parsed JSON file of this checkout."""
    return json.loads((DATA / name).read_text())


def load(name):
    """The parsed JSON file beside the repository, or None where it is absent."""
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else None


def need(data, name):
    """Skip the running test where its reference is absent."""
    if data is None:
        pytest.skip(f"the full reference file {name} is not beside this checkout ({FOLDER}); tests/hardware/data is")
    return data
