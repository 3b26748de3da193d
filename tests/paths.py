"""Where the checkout is, and the reference data that some checkouts have beside them."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
