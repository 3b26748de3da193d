"""An argument parser whose errors are one line with a remedy, followed by the usage."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, NoReturn

from meshlib.command.choices import COMMAND_FOR, STEP_SETTINGS, is_configuration, is_maxtext
from meshlib.core.errors import nearest

WRONG = 2  # exit status of a usage error


def _is_setting(name: str) -> bool:
    """Whether `--set` takes this field of a Transformer, its numerics or its training step."""
    from meshlib.layers.numerics import Numerics
    from meshlib.models.config import TransformerConfig

    return name in (*STEP_SETTINGS, *TransformerConfig.__dataclass_fields__, *Numerics.__dataclass_fields__)


def _split(args: list[str]) -> tuple[list[str], list[list[str]]]:
    """The arguments without the groups after each `--`, and those groups, of a MaxText configuration KEY=VALUE alone.

    >>> _split(["compare", "base.yml", "a=1", "--", "b=2", "--slice", "v5e-16", "--", "c=3"])
    (['compare', 'base.yml', 'a=1', '--slice', 'v5e-16'], [['b=2'], ['c=3']])
    >>> _split(["compare", "gpt2", "--slice", "v5e-16", "--", "--batch", "64"])
    (['compare', 'gpt2', '--slice', 'v5e-16'], [['--batch', '64']])
    """
    common: list[str] = []
    changes: list[list[str]] = []
    configuration = any(map(is_configuration, args))
    for text in args:
        if text == "--":
            changes.append([])
        elif changes and (not configuration or ("=" in text and text[0] != "-")):
            changes[-1].append(text)
        else:
            common.append(text)
    return common, changes


class _Once(argparse._StoreAction):
    """An option with one value, refused if given twice; argparse would silently take the last."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = namespace.__dict__.setdefault("given_once", {})
        if self.option_strings and self.dest in before:
            raise argparse.ArgumentError(self, f"given twice, {before[self.dest]!r} and {values!r}; a run takes one")
        before[self.dest] = values
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that answers unknown commands, options and choices with the nearest valid one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False
        self.commands: dict[str, Parser] = {}
        self.siblings: dict[str, Parser] = {}  # of a command: all commands
        self.register("action", None, _Once)
        self.register("action", "store", _Once)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments.

        Raises: SystemExit with status 2 for unknown arguments, after one line that names the nearest.
        """
        args, changes = _split([*(sys.argv[1:] if args is None else args)])
        given, unknown = self.parse_known_args(args, namespace)
        given.changes = changes
        command = self.commands.get(getattr(given, "command", ""), self)
        if changes and given.command != "compare":
            command.error("-- begins what meshlib compare changes: meshlib compare gpt2 --slice v5e-8 -- --batch 64")
        given.others = [] if is_maxtext(given) else [command.changed(given, change) for change in changes]
        given.overrides = [text for text in unknown if "=" in text and text[0] != "-"] if is_maxtext(given) else []
        surplus = [text for text in unknown if text not in given.overrides]
        if surplus:
            command.error(command.unknown(surplus, is_maxtext(given)))
        return given

    def changed(self, given: argparse.Namespace, change: Sequence[str]) -> argparse.Namespace:
        """The arguments of a command with others in the place of some; values of --set are added."""
        if not change:
            self.error("-- is followed by what changes, such as -- --batch 64, or another model: -- gpt2-medium")
        if "=" in change[0] and not change[0].startswith("-"):
            self.error(self.unknown(change))
        where = [] if "--slice" in change else ["--slice", given.slice]
        program = [given.program] if change[0].startswith("-") else []
        alone, unknown = self.parse_known_args([*program, *where, *change])
        if unknown:
            self.error(self.unknown(unknown))
        if alone.json or alone.quiet:
            self.error("--json and --quiet are for the whole answer; they come before --")
        own = {name: value for name, value in vars(alone).items() if value != self.get_default(name)}
        if alone.set:
            names = {text.partition("=")[0] for text in alone.set}
            own["set"] = [*(text for text in given.set or () if text.partition("=")[0] not in names), *alone.set]
        if alone.mesh or alone.layout:
            own |= {"mesh": alone.mesh, "layout": alone.layout or given.layout}
        return argparse.Namespace(**{**vars(given), **own})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As in `argparse`, but unknown options are reported before missing ones."""
        known = [option for action in self._actions for option in action.option_strings]
        own = takewhile(lambda text: text.startswith("-"), args or ()) if self.commands else args or ()
        for argument in own:
            name = argument.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in known:
                self.error(self.unknown([argument]))
        return super().parse_known_args(args, namespace)

    def unknown(self, arguments: Sequence[str], configuration: bool = False) -> str:
        """Error for arguments that the parser does not know; overrides of a configuration must be KEY=VALUE."""
        first = arguments[0]
        if not first.startswith("-"):
            name, equals, _ = first.partition("=")
            if equals and name.isidentifier():
                return f"KEY=VALUE is for MaxText configurations; for a field or an argument say --set {first}"
            if configuration:
                return f"{first!r} is not KEY=VALUE, such as per_device_batch_size=2"
            takes = ", ".join(name.upper() for name in self._positional) or "options alone"
            if re.match(r"(\d+\*)?v\d+\w*-", first) and "slice" in self._options:
                return f"unexpected argument {first!r}; several slices are joined by commas: --slice v5e-64,{first}"
            return f"unexpected argument {first!r}; {self.prog} takes {takes}; text with blanks needs quotes"
        name = first.partition("=")[0]
        later = {option for command in self.commands.values() for option in command._options}
        if name[2:] in later:
            return f"no option {name}; options of a command come after it"
        field = name[2:].replace("-", "_")
        if "set" in self._options and _is_setting(field):
            return f"no option {name}; write --set {field}=..."
        alike = [option for option in [*self._options, *later] if option[:1] == name[2:3].lower()]
        hint = nearest(name.lstrip("-").lower(), alike).replace("'", "'--", 1)
        others = [command for command, parser in self.siblings.items() if name[2:] in parser._options]
        hint = hint or (f"; meshlib {', '.join(others)} take{'s' * (len(others) == 1)} it" if others else "")
        if not hint and (answer := COMMAND_FOR.get(name[2:])) in self.siblings:
            hint = f"; meshlib {answer} answers: {self.siblings[answer].description}"
        return f"no option {name}{hint}"

    @property
    def _positional(self) -> list[str]:
        """Names of the arguments that are not options."""
        return [str(action.metavar or action.dest) for action in self._actions if not action.option_strings]

    @property
    def _options(self) -> list[str]:
        """The long options, without their dashes."""
        return [option[2:] for action in self._actions for option in action.option_strings if option[:2] == "--"]

    def error(self, message: str) -> NoReturn:
        """Print one line and the usage, and exit."""
        for action in self._actions:
            ends = ("expected one argument", "without a unit")
            if message.endswith(ends) and f"argument {'/'.join(action.option_strings)}:" in message:
                message += f": {(action.help or '') % vars(action)}"
        message = re.sub(
            r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value, got \2: write \1", message
        )
        sys.stderr.write(f"{self.prog}: {message}\nusage: {self.short_usage()}; {self.prog} --help says more\n")
        sys.exit(WRONG)

    def short_usage(self) -> str:
        """The usage without optional arguments."""
        if self.commands:
            return f"{self.prog} COMMAND ..."
        words = [self.prog]
        for action in self._actions:
            name = action.metavar or action.dest.upper()
            if not action.option_strings:
                words.append(str(name) if action.nargs != "?" else f"[{name}]")
            elif action.required:
                words.append(f"{action.option_strings[-1]} {name}")
        return " ".join([*words, "[options]"])

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        what = "command" if isinstance(action, argparse._SubParsersAction) else "choice"
        known = [str(choice) for choice in action.choices]
        hint = "; write meshlib COMMAND --help" if what == "command" and value == "help" else nearest(str(value), known)
        if what == "command" and (answer := COMMAND_FOR.get(str(value).lower())):
            hint = f"; meshlib {answer} answers: {self.commands[answer].description}"
        hint = hint or f"; there are {', '.join(known)}"
        raise argparse.ArgumentError(None if what == "command" else action, f"no {what} {value!r}{hint}")
