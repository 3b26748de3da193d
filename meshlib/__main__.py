"""`python -m meshlib`: the command `meshlib`. See `meshlib.command`, and `python -m meshlib --help`."""

from __future__ import annotations

import sys

from meshlib.command import main

if __name__ == "__main__":
    sys.exit(main())
