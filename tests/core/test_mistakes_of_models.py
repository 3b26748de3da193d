"""Mistakes in convolutions, mixtures of experts, pipelines and decoding: what is said of each.

Each is an error of ours that says what is wrong, with both numbers, and what is right. `test_bad_calls` has more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import meshlib as mtf
from meshlib import layers, models
from tests.command.mistakes import assert_told
from tests.effort import each

D = mtf.Dimension
B, H, W, C = D("batch", 8), D("height", 8), D("width", 8), D("c", 4)
E, F = D("experts", 4), D("hidden", 8)
R = layers.Routing
TINY, LLAMA, T5 = (models.preset(name).reduced() for name in ("gpt2", "llama2-7b", "t5-11b"))


def image() -> mtf.Tensor:
    return mtf.input("image", [B, H, W, C])


def filters() -> mtf.Tensor:
    return mtf.input("filters", [D("fh", 3), D("fw", 3), C, D("out", 8)])


def tokens(dtype: str = "float32") -> mtf.Tensor:
    return mtf.input("x", [B, D("length", 6), D("d", 4)], dtype=dtype)


@cache
def state() -> mtf.Simulation:
    with mtf.Graph():
        return mtf.simulate(mtf.lower(*models.train_step(TINY, 2, 8)))


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    # conv
    "conv groups do not divide": (
        lambda: mtf.conv2d(image(), filters(), groups=3),
        "3 groups do not divide the channels c:4 and out:8; use 2 or 4",
    ),
    "conv padding word": (
        lambda: mtf.conv2d(image(), filters(), padding="FULL"),
        "padding of dim 'height' must be 'SAME' or 'VALID', got 'FULL'",
    ),
    "conv padding negative": (
        lambda: mtf.conv2d(image(), filters(), padding=-1),
        "padding of dim 'height' must not be negative, got (-1, -1)",
    ),
    "conv stride zero": (
        lambda: mtf.conv2d(image(), filters(), stride=0),
        "stride of dim 'height' must be at least 1, got 0",
    ),
    "conv stride float": (
        lambda: mtf.conv2d(image(), filters(), stride=1.5),
        "stride of dim 'height' must be an integer, got float 1.5",
    ),
    "conv dilation zero": (
        lambda: mtf.conv2d(image(), filters(), dilation=0),
        "dilation of dim 'height' must be at least 1, got 0",
    ),
    "conv channel mismatch": (
        lambda: mtf.conv2d(image(), mtf.input("t", [D("fh", 3), D("fw", 3), D("c", 5), D("out", 8)])),
        "filters have 5 of the channels 'c', but need 4",
    ),
    "conv other channel name": (
        lambda: mtf.conv2d(image(), mtf.input("t", [D("fh", 3), D("fw", 3), D("cc", 4), D("out", 8)])),
        "filters share no dim with x that could be the*those of x [batch:8, c:4]; rename one of them",
    ),
    "conv out dim in image": (
        lambda: mtf.conv2d(image(), mtf.input("t", [D("fh", 3), D("fw", 3), C, D("batch", 8)])),
        "filters share 'c' and 'batch' with x, of which one can be the channels; name the others in group_dims",
    ),
    "conv dtype mix": (
        lambda: mtf.conv2d(image(), mtf.input("t", [D("fh", 3), D("fw", 3), C, D("out", 8)], dtype="bfloat16")),
        "operands have dtypes float32 and bfloat16; cast one, as in mtf.cast(x, 'float32')",
    ),
    "conv1d of rank": (
        lambda: mtf.conv1d(mtf.input("x", [B]), mtf.input("t", [D("fw", 3), C, D("out", 8)])),
        "x needs 1 spatial dim before its last, the*which they are, as in spatial={'height': 'kh'}",
    ),
    "layers.conv2d no out": (lambda: layers.conv2d(image(), 8), "expected a Dimension, got int 8"),
    "layers.conv2d same name": (
        lambda: layers.conv2d(image(), D("width", 8)),
        "spatial dim 'width' is in filters, too; rename it there",
    ),
    "pool stride": (
        lambda: mtf.max_pool(image(), {"height": 2}, strides={"height": 0}),
        "stride of dim 'height' must be at least 1, got 0",
    ),
    "pool unknown dim": (
        lambda: mtf.max_pool(image(), {"hieght": 2}),
        "image: f32[batch:8, height:8, width:8, c:4] has no dim 'hieght'; did you mean 'height'?",
    ),
    "pool too large": (
        lambda: mtf.avg_pool(image(), {"height": 9}),
        "9 does not divide dim 'height' of size 8; pad it to 9 or slice it to 0, or give strides to leave the rest out",
    ),
    "pool negative dilation": (
        lambda: mtf.max_pool(image(), {"height": 2}, dilation=-1),
        "dilation of dim 'height' must be at least 1, got -1",
    ),
    "depthwise mult": (
        lambda: mtf.depthwise_conv2d(image(), mtf.input("t", [D("fh", 3), D("fw", 3), D("c", 3), D("m", 2)])),
        "filters have 3 of the channels 'c', but need 4",
    ),
    "space_to_depth": (
        lambda: mtf.space_to_depth(image(), 3, [H, W], C),
        "squares of 3 do not divide dim height:8 and width:8; pad it",
    ),
    "resize zero": (lambda: mtf.resize(image(), {"height": 0}), "the size of 'height' must be at least 1, got 0"),
    "resize method": (
        lambda: mtf.resize(image(), {"height": 4}, method="cubicc"),
        "method must be 'nearest' or 'bilinear', got 'cubicc'",
    ),
    # moe
    "moe top_k > experts": (
        lambda: layers.moe(tokens(), D("e", 2), F, R(top_k=3)),
        "each token chooses 3 experts (top_k), but there are only 2 to choose from; use at most 2",
    ),
    "moe top_k 0": (lambda: R(top_k=0), "top_k must be at least 1, got 0"),
    "moe negative capacity": (lambda: R(capacity_factor=-1.0), "capacity_factor must be positive, got -1.0"),
    "moe groups": (
        lambda: layers.moe(tokens(), E, F, R(expert_groups=3)),
        "4 experts can't be cut into 3 groups of equal size: 4 % 3 = 1; expert_groups may be 2 or 4",
    ),
    "moe groups_per_token": (
        lambda: R(expert_groups=2, groups_per_token=3),
        "groups_per_token must be at most expert_groups, 2, got 3",
    ),
    "moe group_size not dividing": (
        lambda: layers.moe(tokens(), E, F, R(group_size=5)),
        "group_size must divide the tokens of 'batch' and 'length': 48 % 5 = 3",
    ),
    "moe gating name": (
        lambda: R(gating="topk"),
        "gating must be 'top_k' or 'top_2' or 'switch' or 'ntlb' or 'expert_choice', got 'topk'; did you mean 'top_k'?",
    ),
    "moe scores name": (
        lambda: R(scores="sofmax"),
        "scores must be 'softmax' or 'sigmoid', got 'sofmax'; did you mean 'softmax'?",
    ),
    "moe jitter": (lambda: R(jitter=-0.1), "jitter must be in [0, 1), got -0.1"),
    "moe dropout 1": (
        lambda: layers.moe(tokens(), E, F, dropout=1.0, training=True),
        "rate must be in [0, 1), got 1.0",
    ),
    "moe activation": (
        lambda: layers.moe(tokens(), E, F, activation="rleu"),
        "activation must be 'gelu' or 'gelu_exact' or 'relu' or 'silu' or 'linear', got 'rleu'; did you mean 'relu'?",
    ),
    "moe int tokens": (
        lambda: layers.moe(tokens("int32"), E, F),
        "needs a float tensor, got x: i32[batch:8, length:6, d:4]; cast it with mtf.cast",
    ),
    "moe hidden=experts": (
        lambda: layers.moe(tokens(), E, D("experts", 8)),
        "new_dims experts:8 are in moe/dispatched:*d:4] already; rename one side",
    ),
    "moe form": (
        lambda: layers.moe(tokens(), E, F, form="sparse"),
        "form must be 'einsum' or 'gather' or 'dense' or 'grouped', got 'sparse'",
    ),
    "moe two routings for one level": (
        lambda: layers.moe(tokens(), E, F, [R(), R()]),
        "routing must be one, or one for each dim of experts: there are 1 dims, but 2 routings",
    ),
    "moe min cap": (lambda: R(min_expert_capacity=-1), "min_expert_capacity must be at least 1, got -1"),
    "moe nonpadding float": (
        lambda: layers.moe(tokens(), E, F, nonpadding=mtf.input("m", [B, D("length", 6)])),
        "nonpadding must be bool and have the dims of x but the last, [batch:8, length:6]",
    ),
    "moe loss coef nan": (lambda: R(loss_coef=float("nan")), "loss_coef must be a finite number, got float nan"),
    "moe second policy": (
        lambda: R(second_policy="sometimes"),
        "second_policy must be 'all' or 'none' or 'threshold' or 'random', got 'sometimes'",
    ),
    "moe threshold": (
        lambda: R(second_policy="threshold", second_threshold=1.5),
        "second_threshold is a share of a token's gates and must be at most 1, got 1.5",
    ),
    "moe no d_model": (
        lambda: layers.moe(mtf.input("x", [B]), E, F),
        "needs [groups..., tokens, features], got x: f32[batch:8]",
    ),
    # pipelines
    "pipeline stages 0": (lambda: models.Pipeline(stages=0, microbatches=2), "stages must be at least 1, got 0"),
    "pipeline micro": (
        lambda: models.train_step(TINY, 4, 8, pipeline=models.Pipeline(stages=2, microbatches=3)),
        "a batch of 4 can't be cut into 3 microbatches: 4 % 3 = 1; use 2 or 4",
    ),
    "pipeline repeats": (
        lambda: models.train_step(TINY, 4, 8, pipeline=models.Pipeline(stages=2, microbatches=2, repeats=3)),
        "2 layers can't be cut into 2 stages * 3 repeats: 2*may be 1, 2. Or use config.replace(layers=6)",
    ),
    "pipeline remat": (
        lambda: models.Pipeline(stages=2, microbatches=2, remat="some"),
        "remat must be 'full' or 'none' or 'matmuls', got 'some'",
    ),
    "pipeline no function": (
        lambda: layers.pipeline(None, tokens(), 2, 2),
        "stage_fn must be a function of a tensor, got None",
    ),
    "pipeline batch not dividing": (
        lambda: layers.pipeline(lambda x: x, tokens(), 2, 3),
        "x: f32[batch:8, length:6, d:4] can't be cut into 3 equal microbatches: 8 % 3 = 2; use 2 or 4",
    ),
    "pipeline shape change": (
        lambda: layers.pipeline(lambda x: mtf.reduce_sum(x, reduced_dim=D("d", 4)), tokens(), 2, 2),
        "stage_fn turns f32[stage:2, batch:4, length:6, d:4]*batch:4, length:6]; types must stay the same",
    ),
    "pipeline not tensor": (
        lambda: layers.pipeline(lambda x: 3.0, tokens(), 2, 2),
        "stage_fn must return a tensor, or a pair of it and a list of tensors to sum, got 3.0",
    ),
    "pipeline as dict": (
        lambda: models.train_step(TINY, 4, 8, pipeline={"stages": 2}),
        "pipeline must be an mtf.models.Pipeline, got {'stages': 2}",
    ),
    "pipeline + accumulation": (
        lambda: models.train_step(TINY, 4, 8, pipeline=models.Pipeline(stages=2, microbatches=2), accumulation=2),
        "accumulation=2 is for plain decoders; leave it out, or*microbatches=2, repeats=1, remat='none'",
    ),
    "accumulation not dividing": (
        lambda: models.train_step(LLAMA, 4, 8, accumulation=3),
        "accumulation must divide the batch: 4 % 3 = 1; use 2 or 4",
    ),
    # decode
    "decode cache 0": (lambda: models.decode_step(TINY, 2, 0), "cache_length must be at least 1, got 0"),
    "decode dtype": (
        lambda: models.decode_step(TINY, 2, 8, cache_dtype="int16"),
        "cache_dtype must be 'float32' or 'bfloat16' or*got 'int16'; did you mean 'int8'?",
    ),
    "decode beams 0": (lambda: models.decode_step(TINY, 2, 8, beams=0), "beams must be at least 1, got 0"),
    "decode missing encoder": (
        lambda: models.decode_step(T5, 2, 8),
        "t5-11b-reduced is of kind 'encoder-decoder' and needs encoder_length, got None",
    ),
    "prefill longer": (
        lambda: models.prefill(TINY, 2, 12, 8),
        "length 12 is longer than cache_length 8; caches also hold the prompt: use cache_length=12 or more",
    ),
    "decode config": (lambda: models.decode_step("gpt2", 2, 8), "expected a TransformerConfig, got str 'gpt2'"),
    "generate token out of vocab": (
        lambda: mtf.generate(TINY, [[10**6]], state(), max_tokens=2),
        "prompt 0 has token 1000000, which is not in 0 to 63",
    ),
    "generate no prompts": (
        lambda: mtf.generate(TINY, [], state(), max_tokens=2),
        "prompts must be a non-empty list of texts or of lists of tokens, got []",
    ),
    "generate max_tokens 0": (
        lambda: mtf.generate(TINY, [[1]], state(), max_tokens=0),
        "max_tokens must be at least 1, got 0",
    ),
    "generate temperature": (
        lambda: mtf.generate(TINY, [[1]], state(), max_tokens=2, temperature=-1),
        "temperature must not be negative, got -1",
    ),
    "generate top_p": (
        lambda: mtf.generate(TINY, [[1]], state(), max_tokens=2, temperature=1.0, top_p=1.5),
        "top_p must be in (0, 1], got 1.5",
    ),
    "generate top_k": (
        lambda: mtf.generate(TINY, [[1]], state(), max_tokens=2, temperature=1.0, top_k=0),
        "top_k must be in 1 to 64, the size of dim vocab:64, got 0",
    ),
    "generate beams+temp": (
        lambda: mtf.generate(TINY, [[1]], state(), max_tokens=2, beams=2, temperature=1.0),
        "beam search draws no samples: leave temperature, top_k and top_p unset, or beams=1",
    ),
    "generate state path": (
        lambda: mtf.generate(TINY, [[1]], "/nowhere/x.safetensors", max_tokens=2),
        "load: /nowhere/x.safetensors can't be read: No such file or directory; there is no folder /nowhere",
    ),
    "generate option": (
        lambda: mtf.generate(TINY, [[1]], state(), max_tokens=2, temprature=1.0),
        "there is no option 'temprature'; did you mean*temperature, top_k, top_p, beams, alpha, stop,",
    ),
    "generate floats": (
        lambda: mtf.generate(TINY, [[1.5]], state(), max_tokens=2),
        "each token of prompt 0 must be an integer, got float 1.5",
    ),
    "serving context": (lambda: mtf.serving(TINY, "v5e-4", context=0), "context must be at least 1, got 0"),
    "serving weight": (
        lambda: mtf.serving(TINY, "v5e-4", weight_dtype="int3"),
        "weight_dtype must be 'bfloat16' or 'float32' or*'float8_e5m2', got 'int3'; did you mean 'int8'?",
    ),
    "serving prompt": (
        lambda: mtf.serving(TINY, "v5e-4", context=8, prompt=9),
        "prompt must be in 1 to 8, the context, got 9",
    ),
    "serving batches": (
        lambda: mtf.serving(TINY, "v5e-4", context=8, batches=[0]),
        "batches must be a non-empty list of numbers of at least 1, got [0]",
    ),
}


@each("code, text", MISTAKES)
def test_a_mistake_is_told(code: Callable[[], object], text: str) -> None:
    assert_told(code, text)
