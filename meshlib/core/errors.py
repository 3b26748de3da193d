"""The errors of the library, all of them a `MeshlibError`."""

from __future__ import annotations

from layouts.errors import LayoutError as LayoutError
from layouts.errors import MeshlibError as MeshlibError
from layouts.errors import nearest as nearest


class GraphError(MeshlibError, ValueError):
    """The program as written is wrong: names, scopes, variables, gradients."""


class ArgumentError(GraphError, TypeError):
    """A function has no argument of that name."""


class ShapeError(GraphError):
    """Dims, sizes or dtypes of an operation's operands do not fit together."""


class ProgramError(MeshlibError):
    """A lowered program breaks its own rules: the checker after each pass raises this."""


class FeedError(MeshlibError, ValueError):
    """What was fed to a program or assigned to its state does not fit."""


class SliceError(MeshlibError, ValueError):
    """The named slice is unknown, or does not fit the mesh."""


class CheckpointError(MeshlibError):
    """A checkpoint cannot be written, is no whole safetensors file, or does not fit the simulation."""


class DamagedError(CheckpointError):
    """A checkpoint whose bytes are not those that were written."""


class NotFiniteError(MeshlibError, ArithmeticError):
    """A fetched value or a variable became NaN; names the operation and core that first made it, or an infinity."""


class MissingError(MeshlibError, ImportError):
    """An optional library is needed and not installed; the message says how to install it."""


class DataError(MeshlibError, ValueError):
    """A file of data is missing, damaged or not what it should be, or a function that is mapped over it failed."""
