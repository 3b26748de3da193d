"""The command `meshlib`.

arguments  what can be asked, and how
subject    the program that it is about: a model's name, or a function in a file
configured configurations of MaxText and of Hugging Face
emitting   a plan as something to run
tuning     `plan base.yml --search`
plan       the verdict, and the ranking of layouts
commands   every other command
terminal   how a run ends: closed pipes, interrupts, faults
"""

from __future__ import annotations

from collections.abc import Sequence

from meshlib.command.arguments import parser
from meshlib.command.plan import is_maxtext
from meshlib.command.terminal import ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns: 0 for good, 1 where something does not fit or a check failed, 2 for wrong arguments or files.
    """
    made = parser()
    args, rest = made.parse_known_args(argv)
    args.overrides = [*getattr(args, "overrides", ()), *rest]
    strange = [text for text in args.overrides if not is_maxtext(args) or text.startswith("-") or "=" not in text]
    if strange:
        made.error(f"unrecognized arguments: {' '.join(strange)}")
    return ended(made.prog, lambda: int(args.run(args)))
