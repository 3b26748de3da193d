"""meshlib: plan, prove and price model-parallel programs before you rent a pod.

Write a program once in named dimensions; say how the dimensions are laid over a mesh of TPU cores; see what each core
runs, which collectives were inserted and why, what they cost, and the numbers, computed shard by shard.

Each `import x as x` below makes a name public, for readers and type checkers alike; there is no second list. A name is
imported on its first use (`meshlib.core.lazy_imports`), so what needs JAX or takes long to load costs nothing until
then.
"""

import sys as _sys
import typing as _typing
from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path


def _check_own_packages() -> None:
    # `meshlib`, `hardware` and `layouts` are common names: on the package index two of them are other projects. A stray
    # module on the path, or a distribution that wrote into the same folder, would otherwise fail in odd ways.
    root = _Path(__file__).resolve().parent.parent
    for name in ("hardware", "layouts"):
        spec = _find_spec(name)
        if spec is None:
            raise ImportError(f"meshlib needs its own package '{name}', which is missing; install meshlib-tpu again")
        origin = _Path(spec.origin or "(namespace package)").resolve()
        if origin != root / name / "__init__.py":
            raise ImportError(
                f"meshlib needs its own package '{name}', but {origin} shadows it; "
                "rename that file or take its folder off the path"
            )
        if b"meshlib-tpu" not in spec.loader.get_data(spec.origin):  # type: ignore[union-attr]  # reads archives too
            raise ImportError(
                f"meshlib needs its own package '{name}', but another distribution has written {origin}; "
                "install meshlib-tpu in an environment of its own"
            )


_check_own_packages()

if _typing.TYPE_CHECKING:
    __version__: str
    from layouts import Dimension as Dimension
    from layouts import LayoutRules as LayoutRules
    from layouts import Mesh as Mesh
    from layouts import Shape as Shape
    from layouts import Sharding as Sharding
    from meshlib import data as data
    from meshlib import generation as generation
    from meshlib import jax as jax
    from meshlib import layers as layers
    from meshlib import models as models
    from meshlib import optimize as optimize
    from meshlib import records as records
    from meshlib import sharing as sharing
    from meshlib import testing as testing
    from meshlib.core import initializers as initializers
    from meshlib.core.compiler import COMPILERS as COMPILERS
    from meshlib.core.compiler import GSPMD as GSPMD
    from meshlib.core.compiler import IDEAL as IDEAL
    from meshlib.core.compiler import NO_OVERLAP as NO_OVERLAP
    from meshlib.core.compiler import XLA_TPU as XLA_TPU
    from meshlib.core.compiler import Compiler as Compiler
    from meshlib.core.errors import CheckpointError as CheckpointError
    from meshlib.core.errors import DataError as DataError
    from meshlib.core.errors import FeedError as FeedError
    from meshlib.core.errors import GraphError as GraphError
    from meshlib.core.errors import LayoutError as LayoutError
    from meshlib.core.errors import MeshlibError as MeshlibError
    from meshlib.core.errors import MissingError as MissingError
    from meshlib.core.errors import NotFiniteError as NotFiniteError
    from meshlib.core.errors import ProgramError as ProgramError
    from meshlib.core.errors import ShapeError as ShapeError
    from meshlib.core.errors import SliceError as SliceError
    from meshlib.core.graph import Graph as Graph
    from meshlib.core.graph import Operation as Operation
    from meshlib.core.graph import Tensor as Tensor
    from meshlib.core.graph import scope as scope
    from meshlib.data.batches import Batches as Batches
    from meshlib.data.vocabulary import BytePairs as BytePairs
    from meshlib.data.vocabulary import TextExamples as TextExamples
    from meshlib.data.vocabulary import text_to_text as text_to_text
    from meshlib.data.vocabulary import texts_in_rows as texts_in_rows
    from meshlib.estimation import Estimate as Estimate
    from meshlib.estimation import HostInput as HostInput
    from meshlib.estimation import Physics as Physics
    from meshlib.estimation import balance as balance
    from meshlib.estimation import estimate as estimate
    from meshlib.estimation.views.scaling import Scaling as Scaling
    from meshlib.estimation.views.scaling import scaling as scaling
    from meshlib.generation import Completion as Completion
    from meshlib.generation import Generator as Generator
    from meshlib.generation import Server as Server
    from meshlib.generation import generate as generate
    from meshlib.jax import Compiled as Compiled
    from meshlib.jax import OnJax as OnJax
    from meshlib.jax import compile_for as compile_for
    from meshlib.jax import from_jax as from_jax
    from meshlib.jax import measure_chip as measure_chip
    from meshlib.jax import on_jax as on_jax
    from meshlib.jax import partition_specs as partition_specs
    from meshlib.layers.numerics import Numerics as Numerics
    from meshlib.lowering import Balance as Balance
    from meshlib.lowering import Collective as Collective
    from meshlib.lowering import Program as Program
    from meshlib.lowering import Session as Session
    from meshlib.lowering import check as check
    from meshlib.lowering import collectives_table as collectives_table
    from meshlib.lowering import explain as explain
    from meshlib.lowering import lower as lower
    from meshlib.models.images import detection as detection
    from meshlib.ops.contraction.einsum import einsum as einsum
    from meshlib.ops.contraction.einsum import matmul as matmul
    from meshlib.ops.contraction.quantized import quantize as quantize
    from meshlib.ops.contraction.quantized import quantized_einsum as quantized_einsum
    from meshlib.ops.contraction.quantized import quantized_ragged_dot as quantized_ragged_dot
    from meshlib.ops.contraction.ragged import ragged_dot as ragged_dot
    from meshlib.ops.control.custom_gradients import custom_gradient as custom_gradient
    from meshlib.ops.control.custom_gradients import recompute_grad as recompute_grad
    from meshlib.ops.control.loops import scan as scan
    from meshlib.ops.control.loops import while_loop as while_loop
    from meshlib.ops.control.remat import Remat as Remat
    from meshlib.ops.control.slicewise import Print as Print
    from meshlib.ops.control.slicewise import slicewise as slicewise
    from meshlib.ops.control.sources import constant as constant
    from meshlib.ops.control.sources import input as input
    from meshlib.ops.control.sources import ones as ones
    from meshlib.ops.control.sources import ones_like as ones_like
    from meshlib.ops.control.sources import step as step
    from meshlib.ops.control.sources import variable as variable
    from meshlib.ops.control.sources import zeros as zeros
    from meshlib.ops.control.sources import zeros_like as zeros_like
    from meshlib.ops.control.state import assign as assign
    from meshlib.ops.control.state import assign_add as assign_add
    from meshlib.ops.control.state import assign_sub as assign_sub
    from meshlib.ops.control.state import constrain as constrain
    from meshlib.ops.control.state import identity as identity
    from meshlib.ops.control.state import stop_gradient as stop_gradient
    from meshlib.ops.fused_attention.attention import attention as attention
    from meshlib.ops.gradients import gradients as gradients
    from meshlib.ops.images.blocks import conv2d_with_blocks as conv2d_with_blocks
    from meshlib.ops.images.blocks import conv3d_with_blocks as conv3d_with_blocks
    from meshlib.ops.images.blocks import depth_to_space as depth_to_space
    from meshlib.ops.images.blocks import space_to_depth as space_to_depth
    from meshlib.ops.images.convolution import conv1d as conv1d
    from meshlib.ops.images.convolution import conv1d_transpose as conv1d_transpose
    from meshlib.ops.images.convolution import conv2d as conv2d
    from meshlib.ops.images.convolution import conv2d_transpose as conv2d_transpose
    from meshlib.ops.images.convolution import conv3d as conv3d
    from meshlib.ops.images.convolution import conv3d_transpose as conv3d_transpose
    from meshlib.ops.images.convolution import depthwise_conv2d as depthwise_conv2d
    from meshlib.ops.images.pooling import avg_pool as avg_pool
    from meshlib.ops.images.pooling import max_pool as max_pool
    from meshlib.ops.images.pooling import pool as pool
    from meshlib.ops.images.resize import resize as resize
    from meshlib.ops.movement.dynamic_slices import dynamic_slice as dynamic_slice
    from meshlib.ops.movement.dynamic_slices import update_rows as update_rows
    from meshlib.ops.movement.dynamic_slices import update_slice as update_slice
    from meshlib.ops.movement.indexing import dynamic_shift as dynamic_shift
    from meshlib.ops.movement.indexing import gather as gather
    from meshlib.ops.movement.indexing import one_hot as one_hot
    from meshlib.ops.movement.indexing import range as range
    from meshlib.ops.movement.indexing import scatter_add as scatter_add
    from meshlib.ops.movement.ranking import argmax as argmax
    from meshlib.ops.movement.ranking import argsort as argsort
    from meshlib.ops.movement.ranking import nth_largest_element as nth_largest_element
    from meshlib.ops.movement.ranking import nth_smallest_element as nth_smallest_element
    from meshlib.ops.movement.ranking import sort as sort
    from meshlib.ops.movement.ranking import top_1 as top_1
    from meshlib.ops.movement.ranking import top_k as top_k
    from meshlib.ops.movement.rearrange import rearrange as rearrange
    from meshlib.ops.movement.rearrange import reduce as reduce
    from meshlib.ops.movement.rearrange import repeat as repeat
    from meshlib.ops.movement.runs import concat as concat
    from meshlib.ops.movement.runs import halo_exchange as halo_exchange
    from meshlib.ops.movement.runs import left_halo_exchange as left_halo_exchange
    from meshlib.ops.movement.runs import pad as pad
    from meshlib.ops.movement.runs import shift as shift
    from meshlib.ops.movement.runs import slice as slice
    from meshlib.ops.movement.runs import split as split
    from meshlib.ops.movement.runs import strided_slice as strided_slice
    from meshlib.ops.movement.shape import anonymize as anonymize
    from meshlib.ops.movement.shape import anonymous_shape as anonymous_shape
    from meshlib.ops.movement.shape import broadcast as broadcast
    from meshlib.ops.movement.shape import combined_dimension as combined_dimension
    from meshlib.ops.movement.shape import rename_dimension as rename_dimension
    from meshlib.ops.movement.shape import replace_dimensions as replace_dimensions
    from meshlib.ops.movement.shape import reshape as reshape
    from meshlib.ops.movement.shape import stack as stack
    from meshlib.ops.movement.shape import transpose as transpose
    from meshlib.ops.movement.shape import unstack as unstack
    from meshlib.ops.pointwise.activations import elu as elu
    from meshlib.ops.pointwise.activations import gelu as gelu
    from meshlib.ops.pointwise.activations import leaky_relu as leaky_relu
    from meshlib.ops.pointwise.activations import selu as selu
    from meshlib.ops.pointwise.activations import silu as silu
    from meshlib.ops.pointwise.activations import softplus as softplus
    from meshlib.ops.pointwise.activations import swish as swish
    from meshlib.ops.pointwise.arithmetic import abs as abs
    from meshlib.ops.pointwise.arithmetic import add as add
    from meshlib.ops.pointwise.arithmetic import add_n as add_n
    from meshlib.ops.pointwise.arithmetic import bitwise_and as bitwise_and
    from meshlib.ops.pointwise.arithmetic import bitwise_or as bitwise_or
    from meshlib.ops.pointwise.arithmetic import bitwise_xor as bitwise_xor
    from meshlib.ops.pointwise.arithmetic import ceil as ceil
    from meshlib.ops.pointwise.arithmetic import clip_by_value as clip_by_value
    from meshlib.ops.pointwise.arithmetic import cos as cos
    from meshlib.ops.pointwise.arithmetic import divide as divide
    from meshlib.ops.pointwise.arithmetic import equal as equal
    from meshlib.ops.pointwise.arithmetic import erf as erf
    from meshlib.ops.pointwise.arithmetic import exp as exp
    from meshlib.ops.pointwise.arithmetic import expm1 as expm1
    from meshlib.ops.pointwise.arithmetic import floor as floor
    from meshlib.ops.pointwise.arithmetic import floordiv as floordiv
    from meshlib.ops.pointwise.arithmetic import greater as greater
    from meshlib.ops.pointwise.arithmetic import greater_equal as greater_equal
    from meshlib.ops.pointwise.arithmetic import left_shift as left_shift
    from meshlib.ops.pointwise.arithmetic import less as less
    from meshlib.ops.pointwise.arithmetic import less_equal as less_equal
    from meshlib.ops.pointwise.arithmetic import log as log
    from meshlib.ops.pointwise.arithmetic import log1p as log1p
    from meshlib.ops.pointwise.arithmetic import logical_and as logical_and
    from meshlib.ops.pointwise.arithmetic import logical_not as logical_not
    from meshlib.ops.pointwise.arithmetic import logical_or as logical_or
    from meshlib.ops.pointwise.arithmetic import maximum as maximum
    from meshlib.ops.pointwise.arithmetic import minimum as minimum
    from meshlib.ops.pointwise.arithmetic import mod as mod
    from meshlib.ops.pointwise.arithmetic import multiply as multiply
    from meshlib.ops.pointwise.arithmetic import negative as negative
    from meshlib.ops.pointwise.arithmetic import not_equal as not_equal
    from meshlib.ops.pointwise.arithmetic import pow as pow
    from meshlib.ops.pointwise.arithmetic import reciprocal as reciprocal
    from meshlib.ops.pointwise.arithmetic import relu as relu
    from meshlib.ops.pointwise.arithmetic import right_shift as right_shift
    from meshlib.ops.pointwise.arithmetic import round as round
    from meshlib.ops.pointwise.arithmetic import rsqrt as rsqrt
    from meshlib.ops.pointwise.arithmetic import sigmoid as sigmoid
    from meshlib.ops.pointwise.arithmetic import sign as sign
    from meshlib.ops.pointwise.arithmetic import sin as sin
    from meshlib.ops.pointwise.arithmetic import sqrt as sqrt
    from meshlib.ops.pointwise.arithmetic import square as square
    from meshlib.ops.pointwise.arithmetic import squared_difference as squared_difference
    from meshlib.ops.pointwise.arithmetic import sub as sub
    from meshlib.ops.pointwise.arithmetic import subtract as subtract
    from meshlib.ops.pointwise.arithmetic import tanh as tanh
    from meshlib.ops.pointwise.arithmetic import where as where
    from meshlib.ops.pointwise.casts import bitcast as bitcast
    from meshlib.ops.pointwise.casts import cast as cast
    from meshlib.ops.pointwise.casts import to_bfloat16 as to_bfloat16
    from meshlib.ops.pointwise.casts import to_float as to_float
    from meshlib.ops.pointwise.casts import to_int32 as to_int32
    from meshlib.ops.pointwise.cumulative import cumprod as cumprod
    from meshlib.ops.pointwise.cumulative import cumsum as cumsum
    from meshlib.ops.pointwise.cumulative import linear_recurrence as linear_recurrence
    from meshlib.ops.pointwise.logic import cond as cond
    from meshlib.ops.pointwise.logic import logical_xor as logical_xor
    from meshlib.ops.pointwise.random import dropout as dropout
    from meshlib.ops.pointwise.random import random_normal as random_normal
    from meshlib.ops.pointwise.random import random_uniform as random_uniform
    from meshlib.ops.pointwise.random import sample_with_temperature as sample_with_temperature
    from meshlib.ops.pointwise.reductions import log_softmax as log_softmax
    from meshlib.ops.pointwise.reductions import reduce_all as reduce_all
    from meshlib.ops.pointwise.reductions import reduce_any as reduce_any
    from meshlib.ops.pointwise.reductions import reduce_logsumexp as reduce_logsumexp
    from meshlib.ops.pointwise.reductions import reduce_max as reduce_max
    from meshlib.ops.pointwise.reductions import reduce_mean as reduce_mean
    from meshlib.ops.pointwise.reductions import reduce_min as reduce_min
    from meshlib.ops.pointwise.reductions import reduce_sum as reduce_sum
    from meshlib.ops.pointwise.reductions import softmax as softmax
    from meshlib.optimize import serialize_training_step as serialize_training_step
    from meshlib.program.views.comparison import Comparison as Comparison
    from meshlib.program.views.comparison import compare as compare
    from meshlib.searching import Found as Found
    from meshlib.searching import search as search
    from meshlib.searching.arrivals import Arrivals as Arrivals
    from meshlib.searching.served_load import ServedLoad as ServedLoad
    from meshlib.searching.serving import serving as serving
    from meshlib.searching.serving_result import Serving as Serving
    from meshlib.sharing import ImageInput as ImageInput
    from meshlib.sharing import export as export
    from meshlib.sharing import load_model as load_model
    from meshlib.simulation import Simulation as Simulation
    from meshlib.simulation import simulate as simulate
    from meshlib.storage.checkpoint import load as load
    from meshlib.storage.checkpoint import save as save
    from meshlib.training import Evaluation as Evaluation
    from meshlib.training import Trained as Trained
    from meshlib.training import train as train
    from meshlib.verification import Verification as Verification
    from meshlib.verification import verify as verify
else:

    def _serve_names() -> None:
        # Loads NumPy, so at the first name only: the command line is quiet at ctrl-C from its first lines.
        from meshlib.core.foreign_names import of_module
        from meshlib.core.lazy_imports import lazy_names
        from meshlib.core.public_calls import public_calls

        wrapped = public_calls(__name__, ["meshlib.ops.", "meshlib.optimize."])
        globals()["__getattr__"], globals()["__dir__"] = lazy_names(__name__, wrapped, of_module)

    class _LastFinder:
        """Answers imports of names and modules that a package does not have as it answers unknown attributes."""

        @staticmethod
        def find_spec(module: str, path: object = None, target: object = None) -> None:
            package, _, name = module.rpartition(".")
            caller = _sys._getframe(2).f_code.co_name  # an import; find_spec of tools gets None from every finder
            if package.partition(".")[0] == __name__ and caller == "_find_and_load_unlocked":
                try:
                    getattr(_sys.modules[package], name)
                except AttributeError as fault:
                    if remedy := str(fault).partition("; ")[2]:
                        raise ModuleNotFoundError(f"no module '{module}'; {remedy}") from None

    _sys.meta_path.append(_LastFinder)

    def __getattr__(name: str) -> _typing.Any:
        _serve_names()
        return __getattr__(name)

    def __dir__() -> list[str]:
        _serve_names()
        return __dir__()
