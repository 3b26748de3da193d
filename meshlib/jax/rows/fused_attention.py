"""Attention kernels of JAX: cuDNN's on GPUs, splash attention on TPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from meshlib.jax.context import Array

if TYPE_CHECKING:
    from meshlib.jax.rows.attention import JaxAttention

LANES = 128  # TPU: multiple of query, key and feature blocks
BLOCK = 512  # largest block of queries or keys, as in MaxText
INTERPRETED = False  # run splash attention in interpreter mode, available on every platform


def implementation(kernel: JaxAttention) -> str | None:
    """The kernel for exactly this attention (bfloat16, unsplit keys, positional masks only), or None."""
    attrs = kernel.part.attrs
    by_position = attrs["causal"] or attrs["window"] is not None
    # Positions count from the first query and key, so both must begin the sequence.
    whole = all(isinstance(n, int) and n == 0 for n in (kernel.first_query, kernel.first_key))
    aligned_rows = whole and not kernel.part.runs[1] and (not by_position or kernel.queries == kernel.keys)
    if kernel.mask is not None or not aligned_rows:
        return None
    size = kernel.q.shape[-1]
    narrow = kernel.q.dtype == jnp.bfloat16
    if kernel.context.platform == "gpu" and narrow:
        return "cudnn" if size == kernel.v.shape[-1] and size % 8 == 0 and size <= LANES and _accepted(kernel) else None
    if (kernel.context.platform == "tpu" and narrow) or INTERPRETED:
        return "splash" if kernel.queries % LANES == 0 and kernel.keys % LANES == 0 else None
    return None


def _accepted(kernel: JaxAttention) -> bool:
    """True if JAX takes this attention to cuDNN: not with a window to both sides, nor on GPUs before Ampere."""
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (kernel.q, kernel.k, kernel.v))
    try:
        jax.eval_shape(_function(kernel, "cudnn"), *shapes)
    except (ValueError, NotImplementedError, RuntimeError):
        return False
    return True


def fused(kernel: JaxAttention, name: str) -> Array:
    """Result of the named kernel: [batch, group, length, value].

    It is called as for its gradients, so that the compiler shares the forward pass with them.
    """
    y: Array = jax.vjp(_function(kernel, name), kernel.q, kernel.k, kernel.v)[0]
    return y


def fused_gradients(kernel: JaxAttention, name: str) -> tuple[Array, Array, Array]:
    """Gradients of `fused`, whose forward pass is repeated; one call serves both gradient operations."""
    assert kernel.dy is not None
    y, back = jax.vjp(_function(kernel, name), kernel.q, kernel.k, kernel.v)
    cotangents: tuple[Array, Array, Array] = back(kernel.dy.astype(y.dtype))
    return cotangents


def _function(kernel: JaxAttention, name: str) -> Callable[[Array, Array, Array], Array]:
    return partial(splash, kernel) if name == "splash" else partial(vendor, kernel, name=name)


def vendor(kernel: JaxAttention, q: Array, k: Array, v: Array, name: str) -> Array:
    """`jax.nn.dot_product_attention` of q [batch, group, length, key], k and v [batch, memory, key]."""
    attrs = kernel.part.attrs
    far = None if attrs["window"] is None else attrs["window"] - 1
    y = jax.nn.dot_product_attention(
        jnp.swapaxes(q, 1, 2),
        k[:, :, None],
        v[:, :, None],
        scale=attrs["scale"],
        is_causal=attrs["causal"],
        local_window_size=None if far is None else (far, 0 if attrs["causal"] else far),
        implementation=name,
    )
    return jnp.swapaxes(y, 1, 2)


def splash(kernel: JaxAttention, q: Array, k: Array, v: Array) -> Array:
    """Splash attention of q [batch, group, length, key], k [batch, memory, key] and v [batch, memory, value].

    It computes only blocks of scores that are not fully masked, and stores none in HBM. Key and value dims are
    zero-padded to whole lanes.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    attrs, shape = kernel.part.attrs, (q.shape[2], k.shape[1])
    far = None if attrs["window"] is None else attrs["window"] - 1
    if far is not None:
        mask = masks.LocalMask(shape, (far, 0 if attrs["causal"] else far), 0)
    else:
        mask = masks.CausalMask(shape) if attrs["causal"] else masks.FullMask(shape)
    rows, keys = _block(shape[0]), _block(shape[1])
    sizes = kernels.BlockSizes(
        block_q=rows, block_kv=keys, block_kv_compute=keys, block_q_dkv=rows, block_kv_dkv=keys,
        block_kv_dkv_compute=keys, block_q_dq=rows, block_kv_dq=keys,
    )  # fmt: skip
    attend = kernels.make_splash_mqa(
        masks.MultiHeadMask([mask] * q.shape[1]), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        interpret=INTERPRETED,
    )  # fmt: skip
    scaled = q * jnp.asarray(attrs["scale"], q.dtype)
    y: Array = jax.vmap(attend)(_filled(scaled), _filled(k), _filled(v))
    return y[..., : v.shape[-1]]


def _block(length: int) -> int:
    """The largest multiple of the lane count up to `BLOCK` that divides a length."""
    return next(n for n in range(BLOCK, 0, -LANES) if length % n == 0)


def _filled(x: Array) -> Array:
    """Pad the last dim with zeros to a multiple of the lane count."""
    short = -x.shape[-1] % LANES
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, short))) if short else x
