"""Chips from TOML files and tables: custom chips, complete or derived from a published one."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardware.checks import HardwareError
from hardware.chips import FIELDS, REQUIRED, Chip, get_chip
from hardware.unknown_names import nearest

MOST_BYTES = 1 << 20  # of a chip file


def load_chip(path: str | Path) -> Chip:
    """Read a chip from a TOML file.

    The keys are the fields of `Chip`. With `base = "v5e"` the file needs only what differs. A table
    `[sources]` may give the source of each figure.

    Args:
      path: the file.
    Returns: the chip.
    Raises: HardwareError for a file that is missing or no TOML, an unknown or missing key, a wrong value.
    Example:
      >>> from pathlib import Path
      >>> from hardware import load_chip
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = Path(folder) / "chip.toml"
      ...     _ = file.write_text('name = "mine"\\nbase = "v5e"\\nhbm_bytes_per_second = 1.6e12\\n')
      ...     load_chip(file).hbm_bytes_per_second
      1600000000000.0
    """
    try:
        about = os.stat(os.fspath(path))
        if not stat.S_ISREG(about.st_mode) or about.st_size > MOST_BYTES:  # a pipe blocks, a device never ends
            raise ValueError(f"it is not a regular file of at most {MOST_BYTES} bytes")
        table: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError, RecursionError) as fault:  # also no paths, files not TOML
        raise HardwareError(f"cannot read a chip from {path!s:.200}: {fault!s:.200}") from None
    return chip_from_table(table, str(path))


def chip_from_table(table: Mapping[str, Any], where: str = "chip table") -> Chip:
    """A chip from a mapping of field -> value, as `load_chip` reads it from a file.

    A chip of your own has a name of its own: `name` is not taken over from the base.

    Raises: HardwareError as `load_chip`.
    Example:
      >>> chip_from_table({"name": "mine", "base": "v4", "mxus_per_core": 8}).mxus_per_core
      8
    """
    if not isinstance(table, Mapping):
        raise HardwareError(f"{where}: a chip is read from a table of figure -> value, not {table!r:.80}")
    values = dict(table)
    base = values.pop("base", None)
    sources = values.pop("sources", {})
    unknown = [key for key in values if key not in FIELDS]
    if unknown:
        raise HardwareError(f"{where}: a chip has no figure {unknown[0]!r:.80}{nearest(unknown[0], FIELDS)}")
    if not isinstance(sources, Mapping):
        raise HardwareError(f"{where}: sources must be a table of figure -> text, not {sources!r:.80}")
    start: dict[str, Any] = {}
    if base is not None:
        chip = get_chip(base)
        start = {name: getattr(chip, name) for name in FIELDS if name not in values and name != "name"}
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    inherited = {key: text for key, text in start.pop("sources", ()) if key not in values}
    values = {**start, **values, "sources": tuple({**inherited, **sources}.items())}
    if missing := sorted(REQUIRED - set(values)):
        raise HardwareError(f"{where}: missing {', '.join(missing)}; give them, or a base such as base = 'v5e'")
    return Chip(**values)
