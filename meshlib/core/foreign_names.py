"""Names from NumPy, JAX, PyTorch and Mesh TensorFlow, with their counterparts in this library."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection

from meshlib.core.dtypes import BY_NAME

# Array attributes -> the expression for a tensor x.
OF_TENSORS = {
    "T": "mtf.transpose(x, ...); dims go by name, so einsum needs none",
    "astype": "mtf.cast(x, dtype)",
    "device": "a program is laid over a mesh by mtf.lower(y, mesh=..., layout=...)",
    "dot": "mtf.einsum([x, y], output_shape=...)",
    "dims": "x.shape",
    "outputs": "variables and results are tensors themselves: write x for x.outputs[0]",
    "to_string": "str(x)",
    "value": "a variable is a tensor itself: write x",
    "max": "mtf.reduce_max(x, reduced_dim=...)",
    "mean": "mtf.reduce_mean(x, reduced_dim=...)",
    "mesh": "leave it out: operations know no mesh, which mtf.lower(y, mesh=..., layout=...) takes",
    "min": "mtf.reduce_min(x, reduced_dim=...)",
    "ndim": "len(x.shape)",
    "numpy": "mtf.simulate(mtf.lower({'x': x})).step(...)['x']",
    "plot": 'program.variables["w"].plot(device=0) of a lowered program draws its blocks',
    "permute": "mtf.transpose(x, ...)",
    "prod": "mtf.cumprod(x, dim), which ends with the product",
    "size": "x.shape.size",
    "sum": "mtf.reduce_sum(x, reduced_dim=...)",
    "to": "mtf.cast(x, dtype)",
    "view": "mtf.reshape(x, ...)",
}
_TRANSFORM = "mtf.slicewise(np.fft.fft, ...) over unsplit dims, for real and imaginary parts"
# Functions of NumPy, JAX, PyTorch and TensorFlow -> the counterpart here.
OF_OTHERS = {
    "Dataset": "mtf.Batches",
    "estimator": "mtf.train(run, batches, steps)",
    "expand_dims": "mtf.reshape(x, [dim, *x.shape.dims]); dims of size 1 are rarely needed: others broadcast by name",
    "fft3d": _TRANSFORM,
    "grad": "mtf.gradients",
    "ifft3d": _TRANSFORM,
    "jit": "mtf.lower",
    "max": "mtf.reduce_max",
    "mean": "mtf.reduce_mean",
    "min": "mtf.reduce_min",
    "nn": "mtf.relu, mtf.softmax, ...: operations are names of meshlib itself; layers are in mtf.layers",
    "placeholder": "mtf.input",
    "name_scope": "mtf.scope(name)",
    "signal": _TRANSFORM,
    "squeeze": "mtf.reshape(x, x.shape - dim)",
    "sum": "mtf.reduce_sum",
    "tile": "mtf.broadcast(x, shape)",
    "trainable_variables": "graph.trainable_variables",
    "variable_scope": "mtf.scope(name, reuse=True)",
    "tensor": "mtf.constant or mtf.input",
    "zeros_like": "mtf.zeros(x.shape, x.dtype)",
}
_MIXTURE = "mtf.layers.moe(x, experts, hidden, mtf.layers.Routing(gating=...))"
_LOWERED = "program = mtf.lower(outputs, updates, mesh=..., layout=...)"
_DIMENSION, _SHAPE, _RULES = "mtf.Dimension(name, size)", "mtf.Shape(dims)", 'mtf.LayoutRules("batch:rows;d_ff:cols")'
_GRADIENTS = "mtf.gradients(ys, xs); every operation has its gradient"
_VARIABLE = "mtf.variable(name, shape, initializer)"
_ASSIGN = "mtf.assign(variable, value), assign_add or assign_sub, and give what they return to mtf.lower as updates"
_STATE = "simulation.state[name], assignable; mtf.save(simulation, path) and mtf.load(path, simulation)"
_BLOCK = "simulation.shard(name, core): the block of any tensor on one core"
_GROUPS = "mesh.groups(axes), mesh.coordinate(device) and mesh.device(coordinate) of mtf.Mesh"
_BINARY = "mtf.add, multiply, maximum, ...: dims are broadcast by name"
_REDUCE = "mtf.reduce_sum, reduce_max, reduce_mean, ..."
_POOL = "mtf.max_pool, avg_pool or pool"
_PRINTED = "mtf.Print(x, data, message), or fetch the tensor: mtf.lower({name: x})"
_STACKED = "mtf.scan(..., stack_variables=True), or one variable with a dim for the layers"
_LISTED = "print(program), and mtf.estimate(program, slice).table() with every count"
# Public names of Mesh TensorFlow without a counterpart -> the reason.
SUPERFLUOUS = {
    "control_dependencies": "updates commit together, after every read",
    "Depend": "updates commit together, after every read",
    "LazyAllreduceSum": "sums stay pending where that sends less; print(program) shows them",
    "compatible_lazy_allreduce_sums": "equally pending sums are added before they are reduced",
    "depend": "updates commit together, after every read",
    "global_variables_initializer": "mtf.simulate(program, seed=0) gives variables their first values",
    "group": "mtf.lower(outputs, updates) takes updates as one list",
    "parallel": "a program is what one core runs, and all run it",
    "utils": "it places variables on hosts, and hides summaries, of which there are none",
    "verify_no_new_dims": "each operation checks its dims, and its error names them",
}
# Attributes of graphs in TensorFlow and Mesh TensorFlow -> the counterpart here.
OF_GRAPHS = {
    "all_variables": "[v.output for v in graph.variables.values()]",
    "as_default": "with mtf.Graph() as graph:",
    "combine_assignments": f"leave it out: {SUPERFLUOUS['depend']}",
    "get_tensor_by_name": "keep what the operation returned; graph.variables[name].output is a variable",
    "make_variables_untrainable": "mtf.variable(..., trainable=False), or minimize(loss, variables=...) of the others",
    "name_to_variable": "graph.variables[name].output",
    "rewrite_stack_variables": _STACKED,
    "to_string": "print(program) of the lowered program",
}
# Public names of Mesh TensorFlow that differ here; `OF_OPERATIONS` covers `SomethingOperation` classes.
OF_MESH_TENSORFLOW = {
    "Assign": _ASSIGN,
    "BinaryOpWithBroadcasting": _BINARY,
    "Constant": "mtf.constant(value, shape, dtype)",
    "Conv2or3dBackpropFilterOperation": _GRADIENTS,
    "Conv2or3dBackpropInputOperation": _GRADIENTS,
    "LazyLaidOutTensor": _BLOCK,
    "Lowering": _LOWERED,
    "MeshImpl": _LOWERED,
    "MtfCheckpointSaverListener": "mtf.save(simulation, path)",
    "MtfRestoreHook": "mtf.load(path, simulation)",
    "PoolBackPropOperation": _GRADIENTS,
    "ReadVariable": "the variable itself, which is a tensor",
    "SimdMeshImpl": _LOWERED,
    "StackedVariable": _STACKED,
    "StopGradient": "mtf.stop_gradient(x)",
    "TensorLayout": "layouts.Sharding(shape, mesh, axes)",
    "Variable": _VARIABLE,
    "VariableDType": "mtf.Numerics(variable, slice, activation, precision), numerics= of every layer",
    "assign_add_slice": _ASSIGN,
    "assign_slice": _ASSIGN,
    "assign_sub_slice": _ASSIGN,
    "auto_mtf": "mtf.search(build, slice)",
    "beam_search": "mtf.generate(config, prompts, state, beams=..., alpha=...)",
    "bert": 'mtf.models.preset("bert-base")',
    "binary_arguments_to_tensors": _BINARY,
    "binary_op_with_broadcasting": _BINARY,
    "binary_reduction_fn": _REDUCE,
    "convert_args_to_laid_out_tensors": _BLOCK,
    "convert_to_dimension": _DIMENSION,
    "convert_to_layout_rules": _RULES,
    "convert_to_shape": _SHAPE,
    "cwise": "mtf.slicewise(function, xs) for a NumPy function, or the operation itself, as mtf.exp(x)",
    "experimental": "mtf.optimize, whose optimizers have the schedules and clipping",
    "import_fully_replicated": 'mtf.input(name, shape); the layout decides, and "" leaves it whole on every core',
    "import_laid_out_tensor": "mtf.input(name, shape); the layout cuts what is fed",
    "import_tf_tensor": "mtf.input(name, shape), fed at each step: simulation.step(name=array)",
    "get_variable": _VARIABLE,
    "is_subsequence": "Python's own sequences; dims go by name and have no order to keep",
    "list_product": "math.prod, or shape.size",
    "log_variable_sizes": "mtf.lower(...).variables, and meshlib dims on the command line",
    "mtf_abs": "mtf.abs(x)",
    "mtf_pow": "mtf.pow(x, y)",
    "mtf_range": "mtf.range(dim, dtype)",
    "mtf_slice": "mtf.slice(x, begin, size, dim_name)",
    "placement_mesh_impl": _LOWERED,
    "pnum_to_group": _GROUPS,
    "pnum_to_processor_coordinates": _GROUPS,
    "pool_backprop": _GRADIENTS,
    "pool_fn": _POOL,
    "pool_tensor_1d": "mtf.pool(x, ...) over one dim",
    "pretty_print_counters": _LISTED,
    "processor_coordinates_to_pnum": _GROUPS,
    "processor_groups": _GROUPS,
    "read_variable": "the variable itself, which is a tensor",
    "reduce_first": "mtf.slice(x, 0, 1, dim_name) and mtf.reshape",
    "moe": _MIXTURE,
    "ops": "mtf.einsum, mtf.relu, ...: operations are names of meshlib itself",
    "reduction_fn": _REDUCE,
    "scalar_summary": _PRINTED,
    "summary": _PRINTED,
    "simd_mesh_impl": _LOWERED,
    "stride_tensor_1d": "mtf.strided_slice(x, ...)",
    "tensor_dim_to_mesh_dim_size": "sharding.block_counts, and mesh.axis_size(axis)",
    "tensor_dim_to_size_per_split": "sharding.local_shape",
    "test_utils": "mtf.verify(outputs, updates, layouts=...) and mtf.testing",
    "tpu_variables": _STATE,
    "transformer": "mtf.models: presets, TransformerConfig, train_step; or mtf.layers: multihead_attention, moe",
    "transpose_list_of_lists": "zip(*lists)",
}  # fmt: skip
_MASKS, _CACHES = "scores=mtf.layers.Scores({})", "mtf.generate(config, prompts, state), which has caches"
_LOCAL, _HALO = "mtf.layers.local_attention_{}d(q, k, v, ...)", "mtf.halo_exchange(x, ...)"
_SCHEDULES = "mtf.optimize.piecewise, product, warmup_then_decay, ...: lr= of every optimizer"
# Names of mesh_tensorflow.layers and mesh_tensorflow.optimize.
OF_LAYERS_AND_OPTIMIZERS = {
    "AdafactorWithMultiLRSchedule": _SCHEDULES,
    "AdamWithMultiLRSchedule": _SCHEDULES,
    **dict.fromkeys(("MoE1D", "MoE2D", "transformer_moe_layer_v1", "transformer_moe_layer_v2"), _MIXTURE),
    "DenseInitializer": "mtf.initializers.variance_scaling(...)",
    "VarianceScalingInitializer": "mtf.initializers.variance_scaling(scale, mode, distribution)",
    "adafactor_optimizer_from_hparams": "mtf.optimize.AdafactorOptimizer(...)",
    "attention_bias_local_2d_block": _LOCAL.format(2),
    "attention_bias_local_block": _LOCAL.format(1),
    "attention_mask_autoregressive": _MASKS.format("causal=True"),
    "attention_mask_ignore_padding": _MASKS.format("segments=...") + ", with padding in a segment of its own",
    "attention_mask_same_segment": _MASKS.format("segments=(of queries, of keys)"),
    "compress_mean": "mtf.reduce_mean over a part of a dim that mtf.rearrange has split",
    "compute_lr_for_step": _SCHEDULES,
    "dense_product": "mtf.layers.dense twice, and mtf.multiply",
    "get_dense_kernel_weights": "mtf.variable(name, shape), and mtf.einsum",
    "local_1d_halo_exchange": _HALO,
    "local_2d_halo_exchange": _HALO,
    "local_2d_self_attention_spatial_blocks": _LOCAL.format(2),
    "local_self_attention_spatial_blocks": _LOCAL.format(1),
    "make_optimizer": "mtf.optimize.AdamOptimizer(lr), SgdOptimizer, AdafactorOptimizer, ...",
    "masked_local_attention_1d_incremental": _CACHES,
    "multihead_attention_params": "mtf.layers.multihead_attention(x, ...), which makes its variables",
    "multihead_attention_vars": "mtf.layers.multihead_attention(x, ...), which makes its variables",
    "multihead_encdec_attention_incremental": _CACHES,
    "multihead_self_attention_incremental": _CACHES,
    "multihead_self_attention_memory_compressed": "mtf.layers.latent_attention(...)",
    "multiplicative_jitter": "x * mtf.random_uniform(x.shape, minval=1 - e, maxval=1 + e)",
    "product_learning_rate": _SCHEDULES,
    "reduce_rms": "mtf.sqrt(mtf.reduce_mean(mtf.square(x)))",
    "rename_length_to_memory_length": 'mtf.rename_dimension(x, "length", "memory_length")',
    "separable_conv1d": "mtf.layers.separable_conv",
    "summary_for_clip_activation_gradient": _PRINTED,
    "unit_scaling_convention": "mtf.layers.us_einsum, always of unit scale",
    "weights_nonzero": "mtf.cast(mtf.not_equal(targets, 0), dtype)",
}  # fmt: skip
_ATTENTION, _MODEL = "mtf.layers.multihead_attention(x, ...)", "mtf.models: preset, TransformerConfig, train_step"
_LOOP, _DECODED = "mtf.train(program, batches, steps)", "mtf.generate(config, prompts, state)"
# Names of mesh_tensorflow.transformer and of further modules.
OF_TRANSFORMERS = {
    **dict.fromkeys(("Bitransformer", "LayerStack", "Unitransformer", "build_model", "make_bitransformer"), _MODEL),
    **dict.fromkeys(("TransformerLayer", "make_layer_stack"), _MODEL),
    **dict.fromkeys(("EncDecAttention", "SelfAttention", "attention_params", "enc_dec_attention"), _ATTENTION),
    **dict.fromkeys(("LocalSelfAttention", "local_attention_1d"), _LOCAL.format(1)),
    **dict.fromkeys(("get_estimator", "run", "tpu_estimator_model_fn", "train_model"), _LOOP),
    **dict.fromkeys(("clean_decodes", "decode", "decode_from_file", "greedy_decode", "infer_model"), _DECODED),
    **dict.fromkeys(("constant_learning_rate", "linear_decay", "linear_warmup", "truncated_rsqrt"), _SCHEDULES),
    **dict.fromkeys(("HierarchicalTiling", "auto_logical_to_physical_tpu"), "mtf.estimate(program, slice).placement"),
    **dict.fromkeys(("Vocabulary", "T2tVocabulary", "get_t2t_vocabulary"), "mtf.BytePairs"),
    "DenseReluDense": "mtf.layers.dense_relu_dense(x, ...)",
    "PlacementMeshImpl": _LOWERED,
    "annealed_dropout": "mtf.dropout(x, is_training, keep_prob), with a keep_prob of your own for each phase",
    "autoregressive_inputs": "mtf.shift(targets, 1, dim, wrap=False)",
    "get_variable_dtype": "mtf.Numerics(variable, slice, activation, precision)",
    "pack_dataset": "mtf.texts_in_rows(...)",
    "relative_position_spans": "mtf.layers.relative_position_bias(...)",
    "reversible_half_residual_and_swap": "mtf.recompute_grad(fn, inputs), which keeps the inputs alone",
    "shift_targets": "mtf.shift(targets, 1, dim, wrap=False)",
    "sinusoid_positional_embedding_weights": "mtf.layers.sinusoidal_positions(...)",
    "sublayer_dropout": "mtf.dropout(x, is_training, keep_prob)",
    "sublayer_rms_norm": "mtf.layers.rms_norm(x, ...)",
    "sublayer_true_layer_norm": "mtf.layers.layer_norm(x, ...)",
}  # fmt: skip
# Operation classes of Mesh TensorFlow -> functions whose names differ.
OF_OPERATIONS = {
    "generic_grad": "gradients",
    "import": "input",
    "import_laid_out_tensor": "input",
    "min_max": "maximum, minimum",
    "print": "Print",
    "random": "random_uniform, random_normal",
    "reduce": "reduce_sum, reduce_max, reduce_mean",
    "scalar_add": "add",
    "scalar_multiply": "multiply",
    "scalar_summary": "Print",
}


def of_module(name: str, public: Collection[str]) -> str:
    """What to do in place of a name that the library does not have; "" if unknown.

    Args:
      public: names that the library has.
    Example:
      >>> of_module("EinsumOperation", ["einsum"]), of_module("get_variable", [])
      ('write mtf.einsum', 'write mtf.variable(name, shape, initializer)')
    """
    if name in SUPERFLUOUS:
        return f"leave it out: {SUPERFLUOUS[name]}"
    tables = (OF_MESH_TENSORFLOW, OF_LAYERS_AND_OPTIMIZERS, OF_TRANSFORMERS, OF_OTHERS)
    known = next((table[name] for table in tables if name in table), None)
    if name.endswith(("_backprop_input", "_backprop_filter")):
        known = _GRADIENTS
    if known is None and name.endswith("Operation"):
        snake = re.sub(r"(?<=[a-z\d])(?=[A-Z])", "_", name.removesuffix("Operation")).lower()
        functions = OF_OPERATIONS.get(snake, snake if snake in public else "")
        known = f"mtf.{functions}" if functions else None
    known = known or _at_home(name)
    return f"write {known}" if known else ""


def _at_home(name: str) -> str:
    """A name of another of the library's public packages, or of a dtype; "" if there is none."""
    if name in BY_NAME:
        return f'"{name}": dtypes are given by name'
    library = sys.modules["meshlib"]
    plain = name.removesuffix("_initializer")
    for home in HOMES:
        package = f"mtf.{home}".removesuffix(".")
        names = getattr(library, home).__all__ if home else library.__all__
        for known in (name, plain):
            if known in names and (known == name or home == "initializers"):
                return f"{package}.{known}"
    if name in BELOW:
        return f"import {name}"
    below = (package for package in BELOW if name in vars(sys.modules[package]))
    return next((f"{package}.{name}" for package in below if not name.startswith("_")), "")


BELOW = ("hardware", "layouts")  # packages beside meshlib
# Public packages in which a name is looked for that another of them does not have; "": meshlib itself.
HOMES = ("", "layers", "optimize", "initializers", "models", "data", "generation", "sharing", "records", "testing")

# Argument names of other libraries -> the hint in messages.
OF_ARGUMENTS = {
    "axis": "dims go by name: reduced_dim=, output_shape= or dim=",
    "dims": "dims go by name: reduced_dim=, output_shape= or dim=",
    "core": "a core is given by position: its number, or its place in the mesh",
    "is_training": "give dropout=0, the default, in evaluation",
    **dict.fromkeys(("dims_idx_start", "dims_idx_end"), "dims go by name: batch_norm(x, dims), all but the channels"),
    "keepdims": "reduced dims broadcast back by name, without dims of size 1",
    "mesh": "operations know no mesh: mtf.lower(y, mesh=..., layout=...)",
    "momentum": "write decay=, of the moving averages",
    **dict.fromkeys(
        ("variable_dtype", "master_dtype", "slice_dtype", "activation_dtype"),
        "write numerics=mtf.Numerics(variable, slice, activation)",
    ),
}
# Calls with foreign signatures -> the hint in messages.
OF_CALLS = {
    "Graph": "write with mtf.Graph() as graph: alone",
    "Mesh": "a graph has no mesh: mtf.Mesh('rows:2;cols:4') is axes alone, for mtf.lower(y, mesh=..., layout=...)",
}
# NumPy names of operations that are named differently here.
OF_NUMPY = {
    "absolute": "abs",
    "concatenate": "concat",
    "true_divide": "divide",
    "sum": "reduce_sum",
    "prod": "reduce_prod",
    "power": "pow",
    "rint": "round",
}
