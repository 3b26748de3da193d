"""The fewest bytes that a device has to send, derived by hand, for small programs of every kind.

Each row is a program under a layout with a formula of its minimum: what the best expert would place, under the rules of
the library. Variables, inputs, results and updates lie where the layout says; an axis splits only what a rule lays on
it; work that is divided stays divided; a value gathered by the forward is kept for the backward only where that takes
no more memory than the layout gives it. The derivation is in the row's docstring, its formula in the row.

`NOT_YET` are the rows whose minimum the lowering does not reach, in both types or the one in brackets. Their tests must
fail: whoever reaches one takes it out. `SAMPLE` are rows that are also run, core by core.
"""

from __future__ import annotations

from tests.minima import data_parallel, exchanges, images, lengths, losses, statistics, sums, tensor_parallel
from tests.minima.table import ROWS as ROWS

# Each enters its rows when it is imported.
THEMES = (tensor_parallel, data_parallel, losses, lengths, sums, statistics, exchanges, images)

_FACTORS = {  # factors stay inside sums
    "batch_norm_of_a_split_batch_step",
    "factor_moved_out_of_a_sum",
}
_HALOS = {  # every block with margins is taken for one between two others, though none is on two devices
    "neighbourhood_in_split_rows_and_columns",
}
_LAUNCHES = {  # the bytes are right, in two collectives
    "gathered_over_two_dims_and_axes",
}

NOT_YET = _FACTORS | _HALOS | _LAUNCHES

SAMPLE = (
    "adapter_of_columns_step",
    "argmax_over_a_split",
    "bias_between_two_products",
    "causal_convolution_step",
    "chain_between_two_constraints",
    "chosen_from_a_sum_or_a_whole",
    "class_of_the_first_token",
    "contrastive_loss_step",
    "conv_of_rows_and_channels",
    "conv_of_split_rows_with_gradients",
    "decode_with_a_split_cache_fused",
    "dispatch_and_combine_step",
    "factor_moved_out_of_a_sum",
    "fewer_memory_heads_than_devices_step",
    "mean_cross_entropy_step",
    "neighbourhood_in_split_rows_and_columns",
    "one_hot_in_two_places",
    "sample_of_the_top_k",
    "sum_beside_one_of_its_terms",
    "window_attention",
)
