"""The fewest bytes that a device has to send, derived by hand, for small programs of every kind.

Each row is a program under a layout with a formula of its minimum: what the best expert would place, under the rules of
the library. Variables, inputs, results and updates lie where the layout says; an axis splits only what a rule lays on
it; work that is divided stays divided; a value gathered by the forward is kept for the backward only where that takes
no more memory than the layout gives it. The derivation is in the row's docstring, its formula in the row.

`NOT_YET` are the rows whose minimum the lowering does not reach, in both types or the one in brackets. Their tests must
fail: whoever reaches one takes it out. `SAMPLE` are rows that are also run, core by core.
"""

from __future__ import annotations

from tests.lowering.minima import (
    accumulation,
    data_parallel,
    exchanges,
    experts,
    factors,
    fields,
    images,
    lengths,
    losses,
    pipelines,
    statistics,
    sums,
    tensor_parallel,
)
from tests.lowering.minima.table import ROWS as ROWS

# Each enters its rows when it is imported.
THEMES = (
    tensor_parallel,
    data_parallel,
    losses,
    lengths,
    sums,
    statistics,
    factors,
    fields,
    exchanges,
    experts,
    images,
    pipelines,
    accumulation,
)

_KEPT = {  # what a loop keeps for its gradient is not known to be a product of other things that it keeps
    "batch_norms_kept_in_a_scan_step",
}
_DIFFERENCES = {  # a sum of terms is not made of theirs, which might lose digits
    "loss_beside_its_parts",
}

NOT_YET = _KEPT | _DIFFERENCES

SAMPLE = (
    "argmax_over_a_split",
    "batch_norm_of_a_split_batch_step",
    "batch_norms_recomputed_in_a_scan_step",
    "causal_convolution_step",
    "chosen_from_a_sum_or_a_whole",
    "class_of_the_first_token",
    "contrastive_loss_step",
    "conv_of_split_rows_with_gradients",
    "decode_with_a_split_cache_fused",
    "dilated_conv_that_reaches_past_its_neighbours",
    "dispatch_and_combine_step",
    "experts_by_biased_groups_over_the_data_step",
    "factor_moved_out_of_a_sum",
    "fewer_memory_heads_than_devices_step",
    "gathered_over_two_dims_and_axes",
    "instance_norm_of_a_split_length_step",
    "mean_cross_entropy_step",
    "neighbourhood_in_split_rows_and_columns",
    "one_hot_in_two_places",
    "pipeline_with_split_batch_step",
    "sample_of_the_top_k",
    "scanned_layers_of_microbatches_step",
    "sum_beside_one_of_its_terms",
    "window_attention",
)
