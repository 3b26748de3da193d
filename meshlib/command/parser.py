"""A parser of arguments whose faults are one line that says what to do, with the usage after it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from meshlib.core.errors import nearest

WRONG = 2  # exit status of wrong arguments


class Parser(argparse.ArgumentParser):
    """As `argparse.ArgumentParser`; commands, options and choices that do not exist are answered with the nearest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: dict[str, Parser] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The arguments.

        Raises: SystemExit with status 2 for arguments that do not exist, after one line that names the nearest.
        """
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands.get(getattr(given, "command", ""), self)
            command.error(command.unknown(unknown))
        return given

    def unknown(self, arguments: Sequence[str]) -> str:
        """What to say of arguments that the parser does not know."""
        first = arguments[0]
        if not first.startswith("-"):
            return f"there is an argument too many: {first!r}; text with blanks or ';' needs quotes"
        name = first.partition("=")[0]
        options = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        return f"no option {name}{nearest(name, options)}"

    def error(self, message: str) -> NoReturn:
        """One line, then the usage."""
        usage = " ".join(self.format_usage().split())
        sys.stderr.write(f"{self.prog}: {message}\n{usage[:400]}\nmore: {self.prog} --help\n")
        sys.exit(WRONG)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        what = "command" if isinstance(action, argparse._SubParsersAction) else "choice"
        known = [str(choice) for choice in action.choices]
        hint = nearest(str(value), known) or f"; there are {', '.join(known)}"
        raise argparse.ArgumentError(None if what == "command" else action, f"no {what} {value!r}{hint}")
