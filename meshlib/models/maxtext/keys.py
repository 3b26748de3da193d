"""The keys of a MaxText configuration: defaults of those that are read, and effects of the others.

Every key belongs to exactly one of four tables: `READ` (expressed in the program), `UNREAD` (changes compute, memory
or communication, but is not expressed; reported in `run.unread`), `REFUSED` (selects a model or training step that this
library lacks) and `IGNORED` (paths, data, logging, profiling, numerics without cost; see `ignored`).

Source: AI-Hypercomputer/maxtext: src/maxtext/configs/base.yml and types.py, August 2026; names and default values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshlib.models.maxtext.ignored import IGNORED

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
    Effect("static scales, for which no maximum is taken", _same(
        "act_quantization_calibration_method weight_quantization_calibration_method "
        "bwd_quantization_calibration_method", "absmax"), "quantization"),
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
            **{"batch_split_factor": 1, "use_custom_sort_vjp": True, "padded_base_moe_mlp_dim": None},
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


_SAMPLING = "reinforcement learning, which samples beside training"
_DECODER = "this library has none; {}=false override_model_config=true plans the decoder alone"
_BOTH = "plan its training from base.yml, and price its sampling with meshlib serve"
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
