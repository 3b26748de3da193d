"""The command `meshlib`.

arguments  what can be asked, and how
subject    the program that it is about: a model's name, or a function in a file
planning   plan, search, report; plan: the verdict and the ranking as text and as JSON
configured  emitting  tuning    configurations of MaxText; a plan as something to run; `plan base.yml --search`
commands   explain, estimate, profile, compare, check, verify, trace, dims
serving  initial_check  tables    serve; init; slices, models, validate, records
argument_parser  output  figures    arguments that explain themselves; lines that fit; what --json prints
terminal   how a run ends: closed pipes, interrupts, faults
"""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.command.arguments import parser
from meshlib.command.output import terminal_width
from meshlib.command.terminal import ended
from meshlib.core.text import fitted_to


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns: 0 for good, 1 where something does not fit or a check failed, 2 for wrong arguments or files.
    """
    top = parser()
    args = top.parse_args(argv)
    with fitted_to(terminal_width()):
        return ended(f"{top.prog} {args.command}", lambda: int(args.run(args)))
