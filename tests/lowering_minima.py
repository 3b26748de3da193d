"""The fewest bytes that a device has to send, derived by hand, for small programs of every kind.

Each row is a program under a layout with a formula of its minimum: what the best expert would place, under the rules of
the library. Variables, inputs, results and updates lie where the layout says; an axis splits only what a rule lays on
it; work that is divided stays divided; a value gathered by the forward is kept for the backward only where that takes
no more memory than the layout gives it. The derivation is in the row's docstring, its formula in the row.

`NOT_YET` are the rows whose minimum the lowering does not reach, in both types or the one in brackets. Their tests must
fail: whoever reaches one takes it out. `SAMPLE` are rows that are also run, core by core.
"""

from __future__ import annotations

from tests.minima import data_parallel, exchanges, lengths, losses, statistics, sums, tensor_parallel
from tests.minima.table import ROWS as ROWS

# Each enters its rows when it is imported.
THEMES = (tensor_parallel, data_parallel, losses, lengths, sums, statistics, exchanges)

_SEVERAL_USERS = {  # a partial sum that several values are made of is reduced before them
    "adapter_of_columns_large_batch_step",
    "fewer_memory_heads_than_devices_step",
    "one_memory_head_step",
    "sum_beside_one_of_its_terms",
    "sum_scattered_for_one_of_two_users",
    "two_small_products_of_a_sum",
}
_WHOLE_TERMS = {  # a whole term ends a partial sum; additions are not flattened
    "adapter_of_rows",
    "bias_between_two_products",
    "chain_of_additions",
    "chosen_from_a_sum_or_a_whole",
    "constant_added_before_a_mean",
    "contrastive_loss",
    "contrastive_loss_step",
    "masked_sum_of_a_sum",
    "mean_cross_entropy",
    "mean_cross_entropy_over_two_axes",
    "mean_cross_entropy_step",
    "parallel_block_one_after_the_other",
    "parallel_block_step",
    "tied_split_table_and_data_step",
    "tied_split_table_step",
}
_GRADIENTS = {  # a gradient is brought home before it is used, or summed in every trip; factors stay inside sums
    "batch_norm_of_a_split_batch_step",
    "factor_moved_out_of_a_sum",
    "microbatches_step[bfloat16]",
    "two_losses_of_two_inputs_step[float32]",
    "two_losses_step[float32]",
}
_HOMES = {  # a value is brought home that nobody wants there
    "chain_between_two_constraints",
    "dispatch_and_combine_step",
    "fully_sharded_small_batch_step",
    "mask_of_positions_in_two_places_is_free",
    "noise_made_where_it_is_wanted",
    "one_hot_in_two_places",
    "relu_between_two_constraints",
}
_CANDIDATES = {  # all candidates go to all devices
    "accuracy_over_a_split",
    "argmax_of_a_split_batch",
    "argmax_over_a_split",
    "sample_of_the_top_k",
    "sample_over_a_split",
    "top_k_over_a_split",
}
_LENGTHS = {  # a split memory is gathered, as is what one token is taken of; each shift has a halo of its own
    "attention_to_a_long_split_memory",
    "causal_convolution",
    "causal_convolution_step",
    "class_of_the_first_token",
    "decode_with_a_split_cache_fused",
    "last_token",
    "logits_of_the_last_token",
    "neighbourhood_in_split_rows_and_columns",
    "window_attention",
}
_LAUNCHES = {  # the bytes are right, in two collectives
    "gathered_over_two_dims_and_axes",
}

NOT_YET = frozenset().union(_SEVERAL_USERS, _WHOLE_TERMS, _GRADIENTS, _HOMES, _CANDIDATES, _LENGTHS, _LAUNCHES)

SAMPLE = (
    "adapter_of_columns_step",
    "argmax_over_a_split",
    "bias_between_two_products",
    "causal_convolution_step",
    "chain_between_two_constraints",
    "chosen_from_a_sum_or_a_whole",
    "class_of_the_first_token",
    "contrastive_loss_step",
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
