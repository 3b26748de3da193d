"""The keys of a MaxText configuration: defaults of those that are read, and effects of the others.

Every key belongs to exactly one of four tables: `READ` (expressed in the program), `UNREAD` (changes compute, memory
or communication, but is not expressed; reported in `run.unread`), `REFUSED` (selects a model or training step that this
library lacks) and `IGNORED` (paths, data, logging, profiling, numerics without cost).

Source: AI-Hypercomputer/maxtext: src/maxtext/configs/base.yml and types.py, August 2026; names, default values, and
logical axis rules for training, without those for caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

_NAMES = """
model_call_mode partial_rotary_factor quantize_kvcache
abort_on_inf_loss abort_on_nan_loss activation_dropout_for_audio
activation_function_for_audio adam_b1 adam_b2 adam_eps adam_eps_root adam_weight_decay adamw_mask add_bos add_eos
ar_cache_axis_order async_checkpointing async_scheduling attention_dropout_for_audio attention_for_vit
attn_module_name audio_path audio_placeholder autoregressive_decode_assert base_config base_output_directory
block_diffusion_canvas_policy block_diffusion_logit_alignment block_diffusion_mask_id block_diffusion_min_noise
causal_block_size chat_template chat_template_path check_vma
checkpoint_conversion_fn checkpoint_is_quantized checkpoint_period checkpoint_storage_concurrent_gb
checkpoint_storage_target_data_file_size_bytes checkpoint_storage_use_ocdbt checkpoint_storage_use_zarr3
checkpoint_todelete_full_path checkpoint_todelete_subdir colocated_python_checkpointing colocated_python_data_input
communication_overlapping_alpha compile_topology compile_topology_num_slices compiled_trainstep_file
compressed_rope_max_timescale constant_bound_config conv_chunksize_for_audio conv_stride_for_vit
convert_checkpoint_if_possible cost_estimate_flops_bwd cost_estimate_flops_fwd custom_mesh_and_rule_for_eval
d_model_for_audio data_sharding data_shuffle_seed data_template_path dataset_name dataset_path dataset_type
dcn_bandwidth_burst dcn_bandwidth_interface dcn_bandwidth_latency debug_converter debug_sharding
decode_sampling_nucleus_p decode_sampling_strategy decode_sampling_temperature decode_sampling_top_k
deepstack_visual_indexes_for_vit default_prompt dense_init_scale diloco_outer_lr diloco_outer_momentum
diloco_sync_period distill_alpha distill_alpha_end distill_alpha_schedule distill_beta distill_beta_end
distill_beta_schedule distill_feature_loss_type distill_layer_indices distill_student_weights_share_map
distill_temperature distill_temperature_end distill_temperature_schedule distill_weights_copy_map
downsample_hidden_size_for_audio dtype_mm dump_hlo dump_hlo_delete_local_after dump_hlo_gcs_dir dump_hlo_local_dir
dump_hlo_local_module_name dump_hlo_module_name dump_hlo_upload_all dump_hlo_xla_flags dump_jaxpr
dump_jaxpr_delete_local_after dump_jaxpr_gcs_dir dump_jaxpr_local_dir dump_step elastic_backup_kind elastic_enabled
elastic_max_retries elastic_min_slice_count elastic_timeout_seconds enable_autocheckpoint
enable_checkpoint_cloud_logger enable_checkpointing enable_continuous_checkpointing enable_data_shuffling
enable_dp_attention enable_emergency_checkpoint enable_expert_parallel enable_gcp_goodput_metrics
enable_gcp_step_deviation_metrics enable_goodput_recording enable_jax_profiler enable_llm_inference_pool
enable_mhc_lite enable_model_warmup enable_multi_tier_checkpointing enable_nnx enable_orbax_v1
enable_padding_causal_mask enable_pathways_goodput enable_prefix_caching enable_single_controller
enable_single_replica_ckpt_restoring enable_tensorboard enable_tpu_profiling_options enable_wandb
encoder_attention_heads_for_audio encoder_ffn_dim_for_audio encoder_layers_for_audio engram engram_head_dim
engram_kernel_size engram_max_ngram_size engram_num_heads engram_seed engram_vocab_bases eval_data_columns
eval_dataset_name eval_image_column eval_per_device_batch_size eval_split eval_start_step eval_steps force_unroll
formatting_func_kwargs formatting_func_path freeze_audio_encoder_params freeze_vision_encoder_params gcs_debug_path
gcs_metrics gdn_chunk_size gdn_conv_kernel_dim gdn_key_head_dim gdn_num_key_heads gdn_num_value_heads
gdn_value_head_dim generate_padding_batch_eval generate_padding_batch_train generate_slice global_rampup_samples
global_rope_max_timescale global_rope_proportion goodput_upload_interval_seconds grain_data_source_max_workers
grain_eval_files grain_file_type grain_index_storage_option grain_num_threads grain_num_threads_eval
grain_packing_type grain_per_worker_buffer_size grain_per_worker_buffer_size_eval grain_prefetch_buffer_size
grain_prefetch_buffer_size_eval grain_ram_budget_mb grain_shuffle_buffer_size grain_train_files
grain_train_mixture_config_path grain_use_elastic_iterator grain_worker_count grain_worker_count_eval
hbm_utilization_vllm heartbeat_reporting_interval_in_seconds hf_access_token hf_data_dir hf_eval_files hf_eval_split
hf_lora_adapter_path hf_name hf_path hf_train_files hidden_size_for_vit hide_profiler_step_metric image_path
image_placeholder image_size_for_vit indexer_approx_top_k_recall indexer_cutoff_threshold indexer_head_dim
indexer_loss_scaling_factor indexer_mask_exact_topk indexer_n_heads indexer_sparse_training indexer_topk
indexer_use_approx_top_k inference_benchmark_test inference_metadata_file inference_microbenchmark_log_file_path
inference_microbenchmark_loop_iters inference_microbenchmark_num_samples inference_microbenchmark_prefill_lengths
inference_microbenchmark_stages inference_server inhomogeneous_layer_cycle_interval init_weights_seed
input_data_sharding_logical_axes intermediate_size_for_vit internal_compile_num_devices jax_cache_dir
jax_debug_log_modules jax_distributed_initialization_timeout jax_profiler_port kv_cache_buffer kv_quant_axis
kv_quant_dtype learning_rate learning_rate_final_fraction learning_rate_schedule_steps load_checkpoint_only_once
load_from_prefill_dir load_full_state_path load_parameters_path local_checkpoint_directory local_checkpoint_period
local_rope_proportion local_sa_fuse_reciprocal local_sa_k_layout local_sa_q_layout local_sa_use_base2_exp
local_sa_v_layout log_config log_moe_bias_norms log_period log_weight_sync_time logical_axis_rules_for_eval
lora_input_adapters_path lr_schedule_type lti_layer_indices lti_use_general_linear_map managed_mldiagnostics
managed_mldiagnostics_on_demand_profiling managed_mldiagnostics_region managed_mldiagnostics_run_group
managed_mldiagnostics_storage_path max_corpus_chars max_inflight_computations max_num_batched_tokens
max_num_checkpoints_to_keep max_num_images_per_example max_num_seqs max_prefill_predict_length
max_sample_len_for_audio max_segments_per_seq max_source_positions_for_audio max_timescale_for_audio metrics_file
mhc_pallas_kernel_bwd_block_size mhc_pallas_kernel_fwd_block_size mla_naive_kvcache mlp_activations_limit
moba_chunk_size moba_topk model_name monitor_goodput monitor_step_time_deviation mrope_section mscale
mtc_data_parallelism mtp_eval_target_module mtp_loss_scaling_factor multi_sampling
multi_tier_checkpointing_backup_interval_minutes multi_tier_checkpointing_backup_interval_steps muon_beta
muon_consistent_rms muon_weight_decay n_window_for_audio n_window_infer_for_audio num_attention_heads_for_vit
num_channels_for_vit num_communication_overlapping_steps num_conv_layers_for_audio num_diloco_fragments num_epoch
num_hidden_layers_for_vit num_mel_bins_for_audio num_position_embeddings_for_vit num_slices o_groups o_lora_rank
offline_data_dir olmo_apply_ngram_filter olmo_index_path olmo_path_remap_from olmo_path_remap_to
out_hidden_size_for_vit output_dim_for_audio override_logical_axis_rules override_model_config packing param_scan_axis
patch_size_for_vit per_device_batch_size_increment per_device_batch_size_start pixel_shuffle_ratio_for_vit
posemb_type_for_vit position_id_per_seconds prefill_cache_axis_order prefill_cache_dir prefill_chunk_size
prefill_slice prefix_caching_dram_byte prefix_caching_hbm_byte profile_cleanly profile_periodically_period
profile_power_events profiler profiler_steps projector_dropout_for_vit projector_input_dim_for_vit
projector_output_dim_for_vit prometheus_port prompt pure_nnx pure_nnx_decoder qk_clip_threshold quant_cfg_path
quantization_local_shard_count ragged_block_size ragged_gather_cost_estimate_bytes_accessed
ragged_gather_cost_estimate_flops ragged_gather_reduce_cost_estimate_bytes_accessed
ragged_gather_reduce_cost_estimate_flops remat_policy_for_vit remove_size_one_mesh_axis_from_type
replicate_quant_scale replicator_backup_interval_minutes report_heartbeat_metric_for_gcp_monitoring
report_performance_metric_for_gcp_monitoring return_log_prob reuse_example_batch rope_interleave rope_min_timescale
rope_pairwise rope_theta_for_vit rope_truncate run_name sa_fuse_reciprocal sa_k_layout sa_q_layout sa_use_base2_exp
sa_v_layout save_checkpoint_on_completion save_checkpoint_on_start save_config_to_gcs save_quantized_params_path
scale_embedding_for_audio sft_train_on_completion_only shard_mode sharding_strategy sharding_tolerance shardy
sinkhorn_iterations skip_first_n_steps_for_profiler skip_jax_distributed_system skip_step_interval
skip_step_scaling_factor source_checkpoint_layout spatial_merge_size_for_vit stack_prefill_result_cache
step_deviation_interval_seconds steps stop_strings student_params_to_update subslice_shape
swap_space_vllm_gb system_prompt target_eval_loss te_comm_gemm_overlap temporal_patch_size_for_vit
tile_size_for_vit tokenize_eval_data tokenize_train_data tokenizer_path tokenizer_type
tpu_num_chips_to_profile_per_task tpu_num_sparse_core_tiles_to_trace tpu_num_sparse_cores_to_trace train_data_columns
train_image_column train_split ulysses_context_sharding upload_all_profiler_results use_audio_in_video
use_chat_template use_chunked_prefill use_double_wide_mlp use_manual_quantization use_mhc_pallas_kernel
use_mrope use_qk_norm_in_gdn use_qwix_quantization use_replicator_service use_sequential_layers use_sft
use_standalone_converter use_truncation use_tunix_gradient_accumulation use_vertex_tensorboard use_weight_converter
vertex_tensorboard_project vertex_tensorboard_region video_max_grid_h video_max_grid_t video_max_grid_w video_path
video_placeholder vision_connector_activation vision_connector_hidden_size vision_connector_num_layers
vision_connector_use_bias vision_encoder_block vision_output_dim_for_vit vision_output_length vision_projector_type
vllm_additional_config vllm_hf_config_path vllm_hf_overrides vllm_load_format vocab_size_per_layer_input
wandb_project_name wandb_run_name warmup_steps_fraction
weight_sparsity_start_step weight_sparsity_update_step weight_sync_debug write_estimator_result
wsd_decay_steps_fraction wsd_decay_style xprof_e2e_enable_fw_power_level_event xprof_e2e_enable_fw_thermal_event
xprof_e2e_enable_fw_throttle_event xprof_tpu_power_trace_level
"""
# Keys that MaxText has removed since.
_REMOVED = """
save_period max_eval_target_length max_predict_length sampling_temperature sampling_top_k
load_from_other_directory load_from_other_directory_step eos_id assets_path vocab_relative_path enable_profiler
hf_data_files grain_data_files prefill_key_axis_order prefill_value_axis_order ar_key_axis_order ar_value_axis_order
eval_batch_num enable_checkpoint_standard_logger train_data_column eval_data_column
inference_microbenchmark_prefix_cache_entries_num inference_microbenchmark_prefix_cache_common_prefix_proportion
collect_stack_trace stack_trace_to_cloud stack_trace_interval_seconds dpo_label_smoothing dpo_beta pagedattn_num_pages
pagedattn_tokens_per_page pagedattn_pages_per_compute_block pagedattn_max_pages_per_group pagedattn_head_dim_alignment
debug
"""
IGNORED = frozenset((_NAMES + _REMOVED).split())


AXES = (
    *("diloco", "data", "stage", "fsdp", "fsdp_transpose", "context", "context_usp_ulysses"),
    *("context_autoregressive", "tensor", "tensor_transpose", "tensor_sequence", "expert", "autoregressive"),
)
# The key of each mesh axis: ici_<part>_parallelism and dcn_<part>_parallelism.
PARTS: Mapping[str, str] = MappingProxyType(
    {axis: {"stage": "pipeline"}.get(axis, axis) for axis in AXES} | {"sequence": "sequence", "model": "tensor"}
)
LOCATIONS = ("remat", "device", "offload")
# Names of values that `remat_policy: custom` places; all but the first may be recomputed.
REMAT_KEYS = (
    *("decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1"),
    *("moe_mlpwo", "query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj", "out_proj", "query_wa_proj"),
    *("kv_wa_proj", "mla_q", "mla_kv", "attention_out"),
)

_SPLASH = tuple(f"sa_block_{name}" for name in (
    "q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq"))  # fmt: skip
READ: Mapping[str, Any] = MappingProxyType(
    {
        # the model
        "decoder_block": "llama2", "global_parameter_scale": 1, "base_emb_dim": 2048, "base_num_query_heads": 16,
        "base_num_kv_heads": 16, "base_mlp_dim": 7168, "base_num_decoder_layers": 16, "head_dim": 128,
        "global_head_dim": 0, "global_num_kv_heads": 0, "mlp_activations": ["silu", "linear"], "vocab_size": 32_000,
        "dropout_rate": 0.0, "enable_dropout": True, "logits_via_embedding": False,
        "normalize_embedding_logits": True, "normalization_layer_epsilon": 1e-5, "final_logits_soft_cap": 0.0,
        "z_loss_multiplier": 0.0, "use_post_attn_norm": False, "use_post_ffw_norm": False, "mlp_bias": False,
        "attention": "autoselected", "attention_type": "global", "attention_bias": False, "use_qk_norm": False,
        "share_kv_projections": False, "sliding_window_size": 0, "chunk_attn_window_size": 0,
        "trainable_position_size": -1, "use_untrainable_positional_embedding": False,
        **dict.fromkeys(_SPLASH, 512), **{f"local_{name}": None for name in _SPLASH}, "sa_use_fused_bwd_kernel": False,
        # latent attention
        "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        # experts
        "num_experts": 1, "num_experts_per_tok": 1, "base_moe_mlp_dim": -1, "sparse_matmul": True, "megablox": True,
        "use_custom_sort_vjp": True,
        "capacity_factor": -1.0, "ragged_buffer_factor": -1.0, "load_balance_loss_weight": 0.0, "norm_topk_prob": False,
        "first_num_dense_layers": 0, "shared_experts": 0, "routed_scaling_factor": 1.0, "routed_score_func": "",
        "routed_bias": False, "n_routing_groups": -1, "topk_routing_group": -1, "interleave_moe_layer_step": 1,
        # positions
        "rope_type": "default", "rope_linear_scaling_factor": 1.0, "rope_use_scale": True,
        "rope_max_timescale": 10_000, "local_rope_max_timescale": -1, "original_max_position_embeddings": 4096,
        "max_position_embeddings": 163_840, "rope_factor": 40, "beta_fast": 32, "beta_slow": 1,
        "rope_attention_scaling": False,
        # numerics
        "dtype": "bfloat16", "weight_dtype": "float32", "grad_dtype": "float32", "quantization": "",
        "act_quantization_calibration_method": "absmax", "weight_quantization_calibration_method": "absmax",
        # batch, optimizer
        "per_device_batch_size": 12.0, "max_target_length": 2048, "gradient_accumulation_steps": 1,
        "gradient_clipping_threshold": 1.0, "opt_type": "adamw", "mu_dtype": "",
        "optimizer_memory_host_offload": False, "num_vocab_tiling": 1,
        # rematerialisation and loops
        "remat_policy": "full", **dict.fromkeys(REMAT_KEYS, "remat") | {"decoder_layer_input": "device"},
        "scan_layers": True, "num_layers_per_pipeline_stage": 1, "num_pipeline_repeats": -1,
        "pipeline_parallel_layers": -1, "num_pipeline_microbatches": -1,
        "set_remat_policy_on_pipeline_iterations": True, "set_remat_policy_on_layers_per_stage": False,
        # mesh and rules
        "custom_mesh_and_rule": "", "mesh_axes": [*AXES], "logical_axis_rules": [], "shard_optimizer_over_data": False,
        "context_parallel_strategy": "all_gather",
        **{f"dcn_{part}_parallelism": 1 for part in PARTS.values()} | {"dcn_data_parallelism": -1},
        **{f"ici_{part}_parallelism": 1 for part in PARTS.values()} | {"ici_fsdp_parallelism": -1},
    }
)  # fmt: skip
_SAMPLING = "reinforcement learning, which samples beside training"
_DECODER = "this library has none; {}=false override_model_config=true plans the decoder alone"
_BOTH = "plan its training from base.yml, and price its sampling with meshlib serve"
LogicalRule = tuple[str, tuple[str, ...]]
_BATCH = ("data", "fsdp", "fsdp_transpose", "expert")
_LENGTH = ("context", "context_usp_ulysses")
_TENSOR = ("tensor", "tensor_sequence")
_HEADS = (*_TENSOR, "autoregressive")
_WEIGHTS = ("fsdp", "fsdp_transpose", *_LENGTH)


def _on(value: Any) -> bool:
    return value is True or value not in (None, False, "", 0, 1, -1, "none", [])


def _enabled(value: Any) -> bool:
    return isinstance(value, Mapping) and any(_on(v) for k, v in value.items() if "enable" in k)


@dataclass(frozen=True)
class Effect:
    """Keys that are not expressed: defaults, their effect, and the key that must be on for them to apply."""

    changes: str
    defaults: Mapping[str, Any]
    gate: str | None = None

    def counts(self, values: Mapping[str, Any]) -> bool:
        """True if the keys apply in a configuration."""
        return self.gate is None or _on(values.get(self.gate, READ.get(self.gate)))


def _same(words: str, default: Any) -> dict[str, Any]:
    return dict.fromkeys(words.split(), default)


_TILES = {f"{w}_tile_{p}_{d}": 512 if d == "batch_seq" else 1024 for w in ("wi", "wo")
          for p in ("fwd", "dlhs", "drhs") for d in ("batch_seq", "embed_dim", "mlp_dim")}  # fmt: skip
EFFECTS: tuple[Effect, ...] = (
    Effect(
        "which attention kernel runs, and how its backward pass is fused",
        {
            **_same("sa_bwd_dkv_megacore use_splash_scheduler use_tokamax_splash", False),
            **_same("use_jax_splash use_ragged_attention use_max_logit_estimate dq_reduction_steps", False),
            **_same("local_sa_use_fused_bwd_kernel local_use_splash_scheduler", None),
            **{"use_max_logit_estimate": -1, "dq_reduction_steps": 0, "ring_scan_unroll": 1, "force_q_layout": False},
            **_same("experimental_sa_quant_q_fp8 experimental_sa_quant_k_fp8", False),
        },
    ),
    Effect("tiles of the experts' ragged products; the estimate uses 512 rows and 1,024 columns",
           {**_TILES, "tile_batch_seq": 512, "tile_embed_dim": 1024, "tile_mlp_dim": 1024,
            **{f"{w}_tile_{p}_buffer_count": 2 for w in ("wi", "wo") for p in ("fwd", "dlhs", "drhs")},
            **_same("wi_combine_scopes wo_combine_scopes", False)}, "num_experts"),
    Effect("fixed scales of cotangents", {"bwd_quantization_calibration_method": "absmax"}, "quantization"),
    Effect("how the axis of the experts splits attention", {"expert_shard_attention_option": "fsdp"},
           "ici_expert_parallelism"),
    Effect(
        "how tokens reach experts, and what of that overlaps with products",
        {
            **_same("use_ring_of_experts use_ragged_sort use_gather_mosaic_kernel merge_gating_gmm", False),
            **_same("use_tokamax_gmm use_gmm_v2 moe_chunk_barrier moe_dispatch_no_expert_sharding", False),
            **_same("use_batch_split_schedule moe_fsdp_use_two_stage_all_gather use_random_routing", False),
            **_same("ragged_gather_fallback ragged_gather_reduce_fallback prefuse_moe_weights", False),
            **{"num_moe_token_chunks": 1, "num_moe_emb_chunks": 0},
            **{"batch_split_factor": 1, "padded_base_moe_mlp_dim": None},
            **{"fuse_expert_scales": False, "ragged_sort_use_single_sparsecore": False},
        },
        "num_experts",
    ),
    Effect("layouts of the experts' weights other than logical_axis_rules give them",
           _same("shard_exp_on_fsdp use_2d_fsdp_sharding", False), "num_experts"),
    Effect("the dtype in which gates and expert sums are computed",
           {"float32_weight_sum": True, "float32_gate_logits": False, "routed_bias_update_rate": 0.0}, "num_experts"),
    Effect("one product for q, k and v, or for both inner products of a feed-forward block, instead of several",
           _same("fused_qkv fused_mlp", False)),
    Effect("the dtype of some element-wise work and products",
           {**_same("activations_in_float32 logits_dot_in_fp32 float32_qk_product float32_logits", False),
            "cast_logits_to_fp32": True, "matmul_precision": "default"}),
    Effect("a tanh of every attention score inside the kernel", {"attn_logits_soft_cap": 0.0}),
    Effect("one more logit for each head, which leads nowhere, and its parameters", {"attention_sink": False}),
    Effect("a product with the table of a one-hot input in place of a look-up", {"use_iota_embed": False}),
    Effect("keeps parameters in host memory and moves them before they are used",
           {"parameter_memory_host_offload": False}),
    Effect("layers that predict further tokens: parameters and products of mtp_num_layers more layers and heads",
           {"mtp_num_layers": 0}),
    Effect("the head's weights are gathered once for all blocks of the loss", {"vocab_tiling_ag_once": False}),
    Effect("when the weights of a pipeline's stages are gathered",
           _same("pipeline_fsdp_ag_once pipeline_fsdp_ag_per_repeat model_fsdp_ag_once", False)),
    Effect("the schedule of the pipeline", {
        "pipeline_delay_activation_forwarding": False, "scan_pipeline_iterations": True,
        "scan_pipeline_repeats": False, "scan_layers_per_stage": False}),
    Effect("evaluation between training steps", {"eval_interval": -1}),
    Effect("sequences of each step while the batch ramps up", {"enable_rampup_batch_size": False}),
    Effect("which parameters have gradients and optimizer state", {"trainable_parameters_mask": []}),
    Effect("statistics of attention scores, by which weights are clipped", {"use_qk_clip": False}),
    Effect("weights with zeros, which are multiplied all the same here",
           {"weight_sparsity_n": None, "weight_sparsity_m": None}),
    Effect("how devices are ordered in the mesh; the estimate takes the best order",
           {"custom_mesh": "", "allow_split_physical_axes": False, "optimize_mesh_for_tpu_v6e": False}),
    Effect("all-gathers of the dense weights in two steps", {"dense_fsdp_use_two_stage_all_gather": False}),
    Effect("the loads of context-parallel devices; the estimate takes even loads",
           {"context_parallel_load_balance": True, "context_parallel_reorder_strategy": "auto",
            "context_sharding": "context"}, "ici_context_parallelism"),
    Effect("flags of the compiler", {"compile_xla_flags": "", "internal_compile": False}),
    Effect("statistics that every layer computes besides", {"record_internal_nn_metrics": 0, "max_checkify": False}),
    Effect("which steps are written at all", {"skip_step_on_spikes": False}),
    Effect("the bandwidth between slices", {"dcn_bandwidth_limit": ""}),
    Effect("the attention kernel's layout of operands", {"compute_axis_order": "0,1,2,3", "reshape_q": False}),
    Effect("slices of weights are multiplied one by one in latent attention",
           {"use_sliced_mla_proj": False, "mla_qk_head_chunk_size": 0}, "q_lora_rank"),
    Effect("every fourth or other layer does not turn queries and keys, or scales them by position",
           {"nope_layer_interval": -1, "temperature_tuning": False}),
    Effect("parameters of the norms of queries, keys and values",
           {"v_norm_with_scale": True, "qk_norm_with_scale": True}),
    Effect("the sharding that inputs are read in", {"expansion_factor_real_data": -1.0}),
)  # fmt: skip
UNREAD: Mapping[str, Any] = MappingProxyType({k: v for effect in EFFECTS for k, v in effect.defaults.items()})


@dataclass(frozen=True)
class Refusal:
    """A key whose value requests something that this library lacks: default, reason, condition, remedy."""

    default: Any
    reason: str
    requested: Callable[[Any], bool] = _on
    instead: str = "this library has no such layers or steps"


REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "use_indexer": Refusal(False, "sparse attention by an indexer (DeepSeek 3.2)"),
        "mhc_expansion_rate": Refusal(1, "hyper-connections of several residual streams"),
        "engram_layers": Refusal([], "Engram layers, which look n-grams up"),
        "compress_ratios": Refusal([], "compressed attention (DeepSeek 4)"),
        "hidden_size_per_layer_input": Refusal(0, "embeddings that every layer adds (Gemma 4 E2B, E4B)"),
        "num_kv_shared_layers": Refusal(0, "layers that reuse the keys and values of others"),
        "moba": Refusal(False, "mixture of block attention"),
        "use_multimodal": Refusal(False, "a vision tower", instead=_DECODER.format("use_multimodal")),
        "use_audio": Refusal(False, "an audio tower", instead=_DECODER.format("use_audio")),
        "attention_output_dim": Refusal(-1, "experts that work in another width than d_model"),
        "moe_expert_input_dim": Refusal(-1, "experts that work in another width than d_model"),
        "first_num_hash_layers": Refusal(0, "layers whose experts are chosen by a hash"),
        "enable_diloco": Refusal(False, "DiLoCo's inner and outer optimizers"),
        "enable_streaming_diloco": Refusal(False, "DiLoCo's inner and outer optimizers"),
        "lora": Refusal(None, "low-rank adapters beside frozen weights", _enabled),
        "dpo": Refusal(None, "preference optimisation, which runs two models", _enabled),
        "use_dpo": Refusal(False, "preference optimisation, which runs two models"),
        "student_overrides": Refusal(None, "distillation, which runs a teacher beside the student", bool),
        "teacher_overrides": Refusal(None, "distillation, which runs a teacher beside the student", bool),
        "rl": Refusal(None, _SAMPLING, bool, _BOTH),
        "trainer_devices_fraction": Refusal(None, _SAMPLING, bool, _BOTH),
        "sampler_devices_fraction": Refusal(None, _SAMPLING, bool, _BOTH),
        "use_grpo": Refusal(False, _SAMPLING, instead=_BOTH),
        "learn_to_init_mode": Refusal(False, "learning to initialise from a teacher"),
        "training_objective": Refusal("causal_lm", "block diffusion", lambda value: value != "causal_lm"),
        "hardware": Refusal("tpu", "hardware other than TPUs", lambda value: value != "tpu"),
    }
)  # fmt: skip
KNOWN = frozenset((*READ, *UNREAD, *REFUSED, *IGNORED))


DEFAULT_RULES: tuple[LogicalRule, ...] = (
    ("activation_embed_and_logits_batch", ("data", "stage", "fsdp", "fsdp_transpose", "expert")),
    ("activation_vocab", _TENSOR), ("activation_vocab", ("tensor",)), ("activation_vocab", ("tensor_sequence",)),
    ("vocab", _HEADS), ("embed_vocab", (*_WEIGHTS, "expert")),
    ("activation_batch_attn", _BATCH), ("activation_heads", _HEADS), ("activation_kv_heads", _TENSOR),
    ("activation_length_attn", _LENGTH), ("activation_q_length", _LENGTH), ("activation_kv_length", ()),
    ("heads", _HEADS), ("q_heads", _HEADS), ("kv_heads", _HEADS), ("qkv", ()), ("kv", ()), ("kv_head_dim", ()),
    ("q_lora", (*_WEIGHTS, "expert")), ("q_lora", ("fsdp", *_LENGTH, "expert")), ("q_lora_up_proj", ()),
    ("kv_lora", (*_WEIGHTS, "expert")), ("kv_lora", ("fsdp", *_LENGTH, "expert")), ("kv_lora_up_proj", ()),
    ("activation_batch_moe", _BATCH), ("activation_length_moe", _LENGTH), ("activation_mlp_moe", _TENSOR),
    ("activation_exp", ("expert",)), ("exp", ("expert",)), ("mlp_moe", ("fsdp_transpose", *_HEADS)),
    ("embed_moe", _WEIGHTS), ("embed_moe", ("fsdp", *_LENGTH)), ("activation_mlp", _TENSOR),
    ("activation_batch", _BATCH), ("activation_length", _LENGTH),
    ("activation_norm_length", ("tensor_sequence", *_LENGTH)), ("activation_embed", ("tensor",)),
    ("activation_stage", ("stage",)), ("mlp", ("fsdp_transpose", *_HEADS)), ("embed", (*_WEIGHTS, "expert")),
    ("embed", ("fsdp", *_LENGTH, "expert")), ("norm", ("tensor",)), ("layers", ("stage",)),
)  # fmt: skip
