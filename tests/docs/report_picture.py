"""Takes the picture of the report's page: verdict, torus, memory and timeline of a plan, as Chromium shows them.

`python -m tests.docs.report_picture` writes it again; it needs Chromium and Pillow.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from meshlib.command import main
from tests.browser import browser
from tests.paths import ROOT

PICTURE = ROOT / "meshlib" / "report" / "report.png"
PLAN = ("llama3-70b", "--slice", "v5e-256")
WIDTH = 1000
# The page without the layout and the table of live buffers, down to the end of the first trip in the timeline.
SHOWN = """(() => {
  document.querySelector("#layout").remove();
  for (let part = document.querySelector("#live"); part;) {
    const next = part.nextElementSibling;
    part.remove();
    part = next;
  }
  const trip = document.querySelectorAll("#timeline svg")[1];
  return Math.ceil(trip.getBoundingClientRect().bottom + window.scrollY + 12);
})()"""


def take(path: Path) -> None:
    """Write the picture to a file."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder, browser() as opened:
        page = Path(folder) / "plan.html"
        main(["report", *PLAN, "--out", str(page)])
        opened.open(page, WIDTH)
        opened.screenshot(path, height=opened.evaluate(SHOWN))
    picture = Image.open(path).convert("RGB")
    picture.quantize(160, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)  # keeps the legend's colours


if __name__ == "__main__":
    sys.exit(take(PICTURE))
