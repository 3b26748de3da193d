"""The result of `from_jax`: a graph that knows the function's arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layouts import LayoutRules, Shape
from meshlib.core.arguments import at
from meshlib.core.errors import GraphError, nearest
from meshlib.core.graph import Graph, Tensor
from meshlib.jax.importing.constraints import Constraint
from meshlib.jax.importing.integers import same_bits
from meshlib.jax.importing.leaves import leaves_of
from meshlib.jax.importing.placement import Specs, rules_of

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Argument:
    """One array among the arguments: its JAX shape, its dims, and whether it is a variable."""

    name: str
    jax_shape: tuple[int, ...]
    shape: Shape
    variable: bool
    axes: tuple[Shape, ...]  # for each axis, the dims whose product it is


@dataclass(frozen=True)
class Call:
    """The function of its arrays alone: their shapes, and their argument names."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]
    names: tuple[str, ...]


@dataclass(eq=False, repr=False)
class ImportedGraph(Graph):
    """A program imported from a JAX function.

    `outputs` are by name, ready for `mtf.lower`; `variables`, `inputs` and `arguments` by the arguments' paths.
    `unused` are paths of arguments that no result depends on; `constraints`, shardings that the function requests.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    arguments: dict[str, Argument] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    # results in JAX shapes
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # for each axis of a result, the dims whose product it is
    result_axes: dict[str, tuple[Shape, ...]] = field(default_factory=dict)
    unsigned: set[str] = field(default_factory=set)  # results and arguments of uint32, computed as int32
    call: Call | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Without the user's function: it may be local, and only the bytes of its own `jit` depend on it.
        return {**super().__getstate__(), "call": None}

    @property
    def loss(self) -> Tensor:
        """The tensor to minimise: the function's first result.

        Raises: GraphError if it has dims or is not a float.
        """
        name, first = next(iter(self.outputs.items()))
        if len(first.shape) or not first.dtype.is_float:
            raise GraphError(f"{at('loss')}: the function's first result, '{name}', is not a number but {first}")
        return first

    def feeds(self, *args: Any) -> dict[str, Array]:
        """Feeds for `sim.step(**feeds)`, from arguments in the function's own structure.

        Arguments that hold variables are ignored, and may be None. So are random keys.
        """
        return self._arrays(args, variables=False)

    def state(self, *args: Any) -> dict[str, Array]:
        """Values for `sim.state[name]` of each variable, from the arguments that hold them."""
        return self._arrays(args, variables=True)

    def to_jax(self, values: Mapping[str, Any]) -> dict[str, Array]:
        """Results, variables or gradients by name, in their JAX shapes."""
        leaves = {}
        for name, value in values.items():
            shape = self.shapes.get(name) if name in self.shapes else None
            if shape is None and name in self.arguments:
                shape = self.arguments[name].jax_shape
            if shape is None:
                known = [*self.shapes, *self.arguments]
                raise GraphError(f"{at('to_jax')}: no result or argument is called {name!r}{nearest(name, known)}")
            array = np.asarray(value).reshape(shape)
            leaves[name] = array.view("uint32") if name in self.unsigned else array
        return leaves

    def layout(self, *specs: Specs, scope: str | None = None) -> LayoutRules:
        """Layout rules equivalent to PartitionSpecs of the arguments.

        Args:
          specs: for each argument of the function its `in_shardings` as for `jax.jit`: a PartitionSpec, a
            NamedSharding, or a tree of them that may end above the arrays; None leaves it open. Axes missing at the end
            of a spec, such as all of a bias under `P()`, follow the specs of other arrays, and are unsplit without any.
          scope: scope of the rules ("variables" for those of parameters alone); by default all.
        Raises: LayoutError if two arrays split one dim over different axes.
        """
        return rules_of(self.arguments, self._names(len(specs)), specs, scope)

    _parameters: tuple[str, ...] = ()

    def _names(self, count: int) -> tuple[str, ...]:
        return self._parameters[:count]

    def _arrays(self, args: tuple[Any, ...], variables: bool) -> dict[str, Array]:
        arrays = {}
        for name, value in leaves_of(self._names(len(args)), args):
            argument = self.arguments.get(name)
            if argument is None or argument.variable != variables:
                continue
            array = np.asarray(value)
            if array.shape != argument.jax_shape:
                raise GraphError(
                    f"{at('feeds')}: '{name}' has shape {list(array.shape)}, but {list(argument.jax_shape)} was traced"
                )
            arrays[name] = same_bits(array).reshape(argument.shape.sizes)
        return arrays
