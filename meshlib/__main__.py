"""`python -m meshlib`: the command `meshlib`. See `meshlib.command`, and `python -m meshlib --help`."""

from __future__ import annotations

import gc
import sys

from meshlib.core.garbage import collect_rarely

INTERRUPTED = 130  # exit status of shells after ctrl-C


def run() -> int:
    """Run the command line of this process, which ends with it; returns its exit status."""
    try:  # imported here, so that ctrl-C is quiet while modules load, too
        from meshlib.command import main

        collect_rarely()
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        gc.freeze()  # the interpreter's last collection would traverse all objects of the answer


if __name__ == "__main__":
    sys.exit(run())
