"""The errors of the library, all subclasses of `MeshlibError`."""

from __future__ import annotations

from layouts.errors import LayoutError as LayoutError
from layouts.errors import MeshlibError as MeshlibError
from layouts.errors import nearest as nearest


class GraphError(MeshlibError, ValueError):
    """The program as written is wrong: names, scopes, variables, gradients.

    Example:
      >>> import meshlib as mtf
      >>> try:
      ...     mtf.optimize.SgdOptimizer(lr=-1.0)
      ... except mtf.GraphError as fault:
      ...     print(str(fault).partition(": ")[2])  # after the function and the user's line
      the learning rate must not be negative, got -1
    """


class ArgumentError(GraphError, TypeError):
    """A function has no argument of that name."""


class ShapeError(GraphError):
    """Dims, sizes or dtypes of an operation's operands do not fit together.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     try:
      ...         mtf.add(mtf.input("x", "a:4"), mtf.input("y", "a:5"))
      ...     except mtf.ShapeError as fault:
      ...         print(str(fault).partition(": ")[2])
      dim 'a' has two sizes, 4 and 5; rename one with mtf.rename_dimension, or make them equal
    """


class ProgramError(MeshlibError):
    """A lowered program breaks its own rules: the checker after each pass raises this.

    Example:
      >>> from dataclasses import replace
      >>> import meshlib as mtf
      >>> from meshlib.program.checker import check_program
      >>> with mtf.Graph():
      ...     program = mtf.lower({"y": mtf.exp(mtf.input("x", "a:4"))})
      >>> try:
      ...     check_program(replace(program, instructions=()), "a pass of yours")
      ... except mtf.ProgramError as fault:
      ...     print(fault)
      after a pass of yours: output 'y' is never computed
    """


class FeedError(MeshlibError, ValueError):
    """A value fed to a program or assigned to its state does not fit.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     sim = mtf.simulate(mtf.lower({"y": mtf.exp(mtf.input("x", "a:4"))}))
      >>> try:
      ...     sim.step(x=[1.0, 2.0])
      ... except mtf.FeedError as fault:
      ...     print(str(fault).partition(": ")[2])
      expected shape [4] for [a:4], got [2]
    """


class SliceError(MeshlibError, ValueError):
    """The named slice is unknown, or does not fit the mesh.

    Example:
      >>> import meshlib as mtf
      >>> try:
      ...     mtf.balance("v5e-8", "data:4")
      ... except mtf.SliceError as fault:
      ...     print(fault)
      balance: mesh data:4 has 4 positions, but slice v5e-8 has 8 devices (8 chips, 8 cores); use data:8
    """


class CheckpointError(MeshlibError):
    """A checkpoint cannot be written, is not a complete safetensors file, or does not fit the simulation.

    Example:
      >>> import meshlib as mtf
      >>> try:
      ...     mtf.sharing.read_config("/nowhere/config.json")
      ... except mtf.CheckpointError as fault:
      ...     print(fault)
      read_config: /nowhere/config.json can't be read: No such file or directory; there is no folder /nowhere
    """


class DamagedError(CheckpointError):
    """A checkpoint whose bytes differ from those that were written."""


class NotFiniteError(MeshlibError, ArithmeticError):
    """A fetched value or a variable became NaN; names the operation and core that first produced it, or an infinity.

    Example:
      >>> import meshlib as mtf
      >>> with mtf.Graph():
      ...     sim = mtf.simulate(mtf.lower({"y": mtf.log(mtf.input("x", "a:2"))}))
      >>> try:
      ...     sim.step(x=[1.0, -1.0])
      ... except mtf.NotFiniteError as fault:
      ...     print(str(fault).partition(":")[0])
      output 'y' became NaN
    """


class MissingError(MeshlibError, ImportError):
    """An optional library is needed and not installed; the message names the command that installs it.

    Example:
      >>> import meshlib as mtf
      >>> issubclass(mtf.MissingError, ImportError)
      True
    """


class DataError(MeshlibError, ValueError):
    """A data file is missing, damaged or malformed, or a function mapped over it failed.

    Example:
      >>> import meshlib as mtf
      >>> try:
      ...     mtf.records.read("/nowhere.records")
      ... except mtf.DataError as fault:
      ...     print(fault)
      records: no file /nowhere.records; check the path
    """
