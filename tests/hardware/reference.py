"""Reference files kept beside the repository; tests that need one are skipped where it is absent."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2].parent / "shared" / "reference"


def load(name):
    """The parsed JSON file, or None where it is absent."""
    path = FOLDER / name
    return json.loads(path.read_text()) if path.exists() else None


def need(data, name):
    """Skip the running test where its reference is absent."""
    if data is None:
        pytest.skip(f"reference file {name} is not beside this checkout ({FOLDER})")
    return data
