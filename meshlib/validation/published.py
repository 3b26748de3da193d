"""Published measurements with their sources, in the format that `python -m meshlib validate --file` reads.

`published_results.json` beside this file has a row for each: facts as published (MaxText's tables and recipes, MLPerf's
results, papers, talks, micro-benchmarks), what follows from them under `derived`, and where each was read. Not all of
them can be expressed as programs; those are listed with the reason.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published_results.json")

ROWS: tuple[dict[str, Any], ...] = tuple(json.loads(FILE.read_text(encoding="utf-8"))["rows"])
