"""The command `meshlib`: the library's answers without a line of Python.

arguments  what can be asked, and how
subject    the program that it is about: a model's name, or a function in a file
plan       the verdict, and the ranking of layouts
commands   every other command
terminal   how a run ends: closed pipes, interrupts, faults
"""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.command.arguments import parser
from meshlib.command.terminal import ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns: 0 for good, 1 where something does not fit or a check failed, 2 for wrong arguments or files.
    """
    made = parser()
    args = made.parse_args(argv)
    return ended(made.prog, lambda: int(args.run(args)))
