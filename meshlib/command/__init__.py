"""The command `meshlib`."""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.command.arguments import parser
from meshlib.command.output import terminal_width
from meshlib.command.terminal import ended
from meshlib.core.text import fitted_to
from meshlib.core.wording import in_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit status.

    Returns: 0 for success, 1 where something does not fit or a check failed, 2 for wrong arguments or files.
    """
    top = parser()
    args = top.parse_args(argv)
    with fitted_to(terminal_width()), in_flags(weight_dtype="--weights", cache_dtype="--caches"):
        return ended(f"{top.prog} {args.command}", lambda: int(args.run(args)))
