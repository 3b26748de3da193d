"""Every public name of Mesh TensorFlow: the same here, or an error that says what to write instead.

Source of the names: tensorflow/mesh, mesh_tensorflow/ (its modules, ops.py, layers.py, optimize.py).
"""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import numpy as np
import pytest

import hardware
import layouts
import meshlib as mtf
from tests.effort import each

TOP = """
abs add add_n AddOperation anonymize anonymous_shape argmax Assign assign assign_add assign_add_slice
assign_slice assign_sub assign_sub_slice auto_mtf beam_search bert binary_arguments_to_tensors
binary_op_with_broadcasting binary_reduction_fn BinaryOpWithBroadcasting broadcast BroadcastOperation cast
combined_dimension compatible_lazy_allreduce_sums concat ConcatOperation Constant constant
conv2d_backprop_filter conv2d_backprop_input conv2d_transpose_backprop_filter conv2d_transpose_backprop_input
Conv2dOperation Conv2dTransposeOperation Conv2or3dBackpropFilterOperation Conv2or3dBackpropInputOperation
conv3d_backprop_filter conv3d_backprop_input conv3d_transpose_backprop_filter conv3d_transpose_backprop_input
Conv3dOperation Conv3dTransposeOperation convert_args_to_laid_out_tensors convert_to_dimension
convert_to_layout_rules convert_to_shape cos cumsum custom_gradient CustomGradientOperation cwise Depend depend
Dimension divide dropout dynamic_shift einsum EinsumOperation elu equal exp experimental floordiv gather gelu
GenericGradOperation get_variable gradients Graph greater greater_equal halo_exchange identity
import_fully_replicated import_laid_out_tensor import_tf_tensor ImportLaidOutTensorOperation ImportOperation
is_subsequence layers LayoutRules LazyAllreduceSum LazyLaidOutTensor leaky_relu left_halo_exchange less
less_equal list_product log log_softmax log_variable_sizes logical_and logical_not logical_or Lowering matmul
maximum Mesh MeshImpl minimum MinMaxOperation mod mtf_abs mtf_pow mtf_range mtf_slice MtfCheckpointSaverListener
MtfRestoreHook multiply negative not_equal nth_largest_element nth_smallest_element one_hot OneHotOperation ones
ones_like Operation optimize pad PadOperation parallel placement_mesh_impl pnum_to_group
pnum_to_processor_coordinates pool_backprop pool_fn pool_tensor_1d PoolBackPropOperation PoolOperation pow
pretty_print_counters Print PrintOperation processor_coordinates_to_pnum processor_groups random_normal
random_uniform RandomOperation range RangeOperation read_variable ReadVariable reciprocal recompute_grad
reduce_all reduce_any reduce_first reduce_logsumexp reduce_max reduce_mean reduce_min reduce_sum ReduceOperation
reduction_fn relu rename_dimension replace_dimensions reshape ReshapeOperation rsqrt sample_with_temperature
scalar_summary ScalarAddOperation ScalarMultiplyOperation ScalarSummaryOperation selu serialize_training_step
Shape shift ShiftOperation sigmoid sign simd_mesh_impl sin slice SliceOperation slicewise SlicewiseOperation
softmax softplus split SplitOperation sqrt square stack StackedVariable StackOperation stop_gradient
StopGradient stride_tensor_1d sub swish tanh Tensor tensor_dim_to_mesh_dim_size tensor_dim_to_size_per_split
TensorLayout test_utils to_bfloat16 to_float to_int32 top_1 top_k TopKOperation tpu_variables transformer
transpose transpose_list_of_lists unstack UnstackOperation utils Variable VariableDType verify_no_new_dims where
while_loop WhileLoopOperation zeros zeros_like
"""
LAYERS = """
summary_for_clip_activation_gradient unit_scaling_convention us_einsum dense get_dense_kernel_weights
dense_product DenseInitializer VarianceScalingInitializer conv1d separable_conv1d conv2d conv2d_with_blocks
conv2d_transpose conv2d_transpose_with_blocks conv3d conv3d_with_blocks conv3d_transpose
conv3d_transpose_with_blocks layer_norm batch_norm softmax_cross_entropy_with_logits
sigmoid_cross_entropy_with_logits weights_nonzero dense_relu_dense local_1d_halo_exchange
local_self_attention_spatial_blocks masked_local_attention_1d masked_local_attention_1d_incremental
local_2d_halo_exchange local_2d_self_attention_spatial_blocks rename_length_to_memory_length
multihead_attention_vars multihead_attention_params dot_product_attention multihead_attention
multihead_self_attention_incremental multihead_encdec_attention_incremental attention_mask_ignore_padding
attention_mask_autoregressive attention_mask_same_segment attention_bias_local_block
attention_bias_local_2d_block multiplicative_jitter multihead_self_attention_memory_compressed compress_mean
embedding_weights embedding max_pool2d max_pool3d avg_pool2d avg_pool3d
"""
OPTIMIZE = """
make_optimizer Optimizer SgdOptimizer MomentumOptimizer AdamWeightDecayOptimizer AdafactorOptimizer
adafactor_decay_rate_adam adafactor_decay_rate_pow adafactor_optimizer_from_hparams reduce_rms
product_learning_rate compute_lr_for_step AdafactorWithMultiLRSchedule AdamWithMultiLRSchedule
"""
TRANSFORMER = """
Bitransformer DenseReluDense EncDecAttention HierarchicalTiling LayerStack LocalSelfAttention PlacementMeshImpl
SelfAttention T2tVocabulary TransformerLayer Unitransformer Vocabulary annealed_dropout attention_params
auto_logical_to_physical_tpu autoregressive_inputs build_model clean_decodes constant_learning_rate decode
decode_from_file enc_dec_attention get_estimator get_t2t_vocabulary get_variable_dtype greedy_decode infer_model
linear_decay linear_warmup local_attention_1d make_bitransformer make_layer_stack pack_dataset
relative_position_spans reversible_half_residual_and_swap run shift_targets sinusoid_positional_embedding_weights
sublayer_dropout sublayer_rms_norm sublayer_true_layer_norm tpu_estimator_model_fn train_model truncated_rsqrt
"""
ROWS = {
    f"{module.__name__}.{name}": (module, name)
    for module, names in ((mtf, TOP + TRANSFORMER), (mtf.layers, LAYERS), (mtf.optimize, OPTIMIZE))
    for name in names.split()
}
ROOTS = {"mtf": mtf, "hardware": hardware, "layouts": layouts}


@each("module, name", ROWS)
def test_a_name_is_public_or_answered(module: ModuleType, name: str) -> None:
    if name in module.__all__:
        assert getattr(module, name) is not None
        return
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    text = str(caught.value)
    assert "; write " in text or "; leave it out: " in text, text
    assert len(text) < 250
    for path in re.findall(r"\b(?:mtf|hardware|layouts)(?:\.\w+)+", text.partition("; write ")[2]):
        root, *attributes = path.split(".")
        value: object = ROOTS[root]
        for attribute in attributes:  # what it says to write exists
            value = getattr(value, attribute)


def test_calls_as_in_mesh_tensorflow_are_answered() -> None:
    with pytest.raises(mtf.MeshlibError, match=r"a graph has no mesh: mtf.Mesh\('rows:2;cols:4'\)"):
        mtf.Mesh(mtf.Graph(), "m")  # type: ignore[call-arg, arg-type]
    with mtf.Graph():
        x, w = mtf.input("x", [mtf.Dimension("a", 2)]), mtf.input("w", [mtf.Dimension("b", 2)])
        with pytest.raises(mtf.MeshlibError, match=r"write einsum\(\[x, w\], ...\)"):
            mtf.einsum(x, w)  # type: ignore[arg-type]
        for call in (
            lambda m: mtf.constant(m, 1.0, "a:2"),
            lambda m: mtf.zeros(m, "a:2"),
            lambda m: mtf.range(m, "a:2"),
            lambda m: mtf.constant(m, 1.0, shape="a:2"),
        ):
            with pytest.raises(mtf.MeshlibError, match=r"operations know no mesh: mtf.lower.*; leave it out: \w+\("):
                call(mtf.Mesh("rows:2"))  # type: ignore[no-untyped-call]
        with pytest.raises(mtf.MeshlibError, match=r"'variable_dtype'; write numerics=mtf.Numerics\("):
            mtf.layers.dense(x, w.shape, variable_dtype="float32")  # type: ignore[call-arg]
        with pytest.raises(mtf.MeshlibError, match=r"by position \(True\) and by name; is_training\? give dropout=0"):
            mtf.layers.dense_relu_dense(x, w.shape.dims[0], True, dropout=0.1)  # type: ignore[misc]
        for name in [
            "all_variables",
            "combine_assignments",
            "make_variables_untrainable",
            "name_to_variable",
            "to_string",
        ]:
            with pytest.raises(AttributeError, match=rf"^a graph has no '{name}': "):
                getattr(x.graph, name)
        with pytest.raises(AttributeError, match="a graph has no 'variable'; did you mean 'variables'"):
            _ = x.graph.variable  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"tensors themselves: write x for x.outputs\[0\]"):
            _ = x.outputs
        assert not hasattr(x, "initializer")
        for wrong, text in (
            (len, r"has no length, but dims \[a:2\]"),
            (float, "has no number"),
            (int, "has no number"),
        ):
            with pytest.raises(mtf.GraphError, match=text):
                wrong(x)
        with pytest.raises(mtf.GraphError, match=r"got list \[1, 2\]; make it a tensor by mtf.constant"):
            x * [1, 2]


ELSEWHERE = {
    "dense": "mtf.layers.dense",
    "AdamOptimizer": "mtf.optimize.AdamOptimizer",
    "truncated_normal_initializer": "mtf.initializers.truncated_normal",
    "zeros_initializer": "mtf.initializers.zeros",
    "TransformerConfig": "mtf.models.TransformerConfig",
    "float32": '"float32": dtypes are given by name',
    "nn": "mtf.relu, mtf.softmax, ",
    "trainable_variables": "graph.trainable_variables",
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_of_another_package_is_answered(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(mtf, name)
    assert f"no attribute '{name}'; write {ELSEWHERE[name]}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("from meshlib import placement_mesh_impl", "; write program = mtf.lower("),
        ("from meshlib import mtf_layers", "; did you mean 'layers'?"),
        ("from meshlib.layers import einsum", "; write mtf.einsum"),
        ("from meshlib.optimize import dense", "; write mtf.layers.dense"),
        ("from meshlib import report", ""),
        ("from meshlib.transformer import transformer, utils", "; write mtf.models: presets, TransformerConfig"),
        ("import meshlib.transformer.utils", "; write mtf.models: presets"),
        ("from meshlib.layerz import dense", "; did you mean 'layers'?"),
        ("from meshlib.hardware import MXU", "; write import hardware"),
        ("from meshlib import nothing_like_it", "cannot import name 'nothing_like_it'"),
    ],
)
def test_imports_of_names_are_answered(line: str, text: str) -> None:
    if not text:
        exec(line, {})  # a package that is no public name
        return
    with pytest.raises(ImportError, match=re.escape(text)):
        exec(line, {})


@pytest.mark.parametrize("module", ["meshlib.transformer", "meshlib.layerz", "meshlib.layers.einsum"])
def test_tools_that_look_for_a_module_find_none(module: str) -> None:
    assert importlib.util.find_spec(module) is None


def test_operations_are_names_of_meshlib_itself() -> None:
    from meshlib import ops

    with pytest.raises(AttributeError, match="no attribute 'einsum'; operations are names of meshlib itself"):
        _ = ops.einsum  # type: ignore[attr-defined]


def test_unknown_attributes_are_answered() -> None:
    with mtf.Graph():
        program = mtf.lower({"y": mtf.exp(mtf.input("x", "a:4"))})
    simulation = mtf.simulate(program)
    with pytest.raises(AttributeError, match="Simulation has no 'stat'; did you mean 'state'"):
        _ = simulation.stat  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"Simulation has no 'losses'; it has .*shard, .*state, step$"):
        _ = simulation.losses  # type: ignore[attr-defined]
    for value, name, known in (
        (mtf.optimize.SgdOptimizer(0.1), "minimise", "minimize"),
        (mtf.data.arrays({"x": np.zeros(4)}), "shufle", "shuffle"),
        (mtf.models.image_preset("resnet-50"), "parameter", "parameters"),
        (mtf.Numerics(), "activations_dtype", "activation_dtype"),
        (mtf.XLA_TPU, "overlaps", "overlap"),
        (mtf.layers.schedule(4, 8), "trip", "trips"),
    ):
        with pytest.raises(AttributeError, match=rf"^{type(value).__name__} has no '{name}'; did you mean '{known}'"):
            getattr(value, name)
    assert not hasattr(simulation, "__array__")


def test_names_of_parts_of_the_machine_are_answered() -> None:
    assert hardware.films.film_of.__name__ == "film_of", "a module of the package, not imported before"
    with pytest.raises(AttributeError, match=r"no attribute 'ring_all_reduce'; write hardware\.ring_steps"):
        _ = hardware.ring_all_reduce
    with pytest.raises(AttributeError, match=r"Chip has no 'hbm'; did you mean 'hbm_bytes' or 'hbm_bytes_per_device'"):
        _ = hardware.CHIPS["v3"].hbm
    with pytest.raises(AttributeError, match="Slice has no 'plot'; a notebook draws it as the last line of a cell"):
        _ = hardware.Slice("v3-8").plot


@pytest.mark.parametrize("name", ["torus", "plot_torus", "torus_plot"])
def test_names_of_pictures_are_answered_with_the_call_that_draws_them(name: str) -> None:
    with mtf.Graph():
        program = mtf.lower({"y": mtf.exp(mtf.input("x", "batch:8"))}, mesh="data:8", layout="batch:data")
    estimate = mtf.estimate(program, "v3-8")
    with pytest.raises(AttributeError, match=rf"^Estimate has no '{name}'; \.plot\(what=\"torus\"\) draws it$"):
        getattr(estimate, name)
    with pytest.raises(AttributeError, match=r"^Estimate has no 'show'; \.plot\(\) draws it; a notebook draws it"):
        _ = estimate.show


def test_what_runs_return_is_shown_in_a_line() -> None:
    with mtf.Graph():
        w = mtf.variable("w", [], 1.0)
        loss = mtf.reduce_mean(mtf.square(mtf.input("x", "batch:4") - w))
        outputs, updates = {"loss": loss}, mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    data = mtf.data.arrays({"x": np.zeros(8, np.float32)}).batch(4)
    trained = mtf.train(mtf.lower(outputs, updates), data, steps=2, progress=False)
    verified = mtf.verify(outputs, updates, layouts=[("data:2", "batch:data")])
    for value, text in (
        (data, "<Data: 8 examples from Arrays>"),
        (trained, "<Trained: step 2, stopped by 'steps'; <Simulation: "),
        (verified, "<Verification of 1 layout against the unsharded program: all equal up to rounding>"),
    ):
        assert repr(value).startswith(text)
        assert len(repr(value)) <= 200


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SystolicArray", "write hardware.MXU(rows, columns).run(weights, x)"),
        ("all_reduce", "write hardware.ring_plans.all_reduce, or hardware.ring_steps.ring_steps('all_reduce', data)"),
        ("Tours", "did you mean 'Torus'?"),
    ],
)
def test_what_students_look_for_is_answered(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(text)):
        getattr(hardware, name)


def test_names_of_the_packages_below_are_answered() -> None:
    with pytest.raises(AttributeError, match=r"'MXU'; write hardware.MXU"):
        _ = mtf.MXU
    run = hardware.MXU(2, 2).run(np.eye(2), np.eye(2))
    with pytest.raises(AttributeError, match=r"Run has no 'plot'; it has cycles, .*save, state, "):
        _ = run.plot  # type: ignore[attr-defined]
