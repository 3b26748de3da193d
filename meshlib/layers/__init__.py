"""Layers, written in operations alone.

They compute in the dtype of their input (bfloat16, as a rule) with variables of `variable_dtype` (float32); norms and
softmax take their statistics in float32. Names and arguments follow Mesh TensorFlow where it has the layer.
"""

from meshlib.layers.attention import dot_product_attention, multihead_attention
from meshlib.layers.embeddings import embedding, embedding_weights
from meshlib.layers.local_attention import local_attention_1d, local_attention_2d, masked_local_attention_1d
from meshlib.layers.loss import sigmoid_cross_entropy_with_logits, softmax_cross_entropy_with_logits
from meshlib.layers.norms import layer_norm, rms_norm
from meshlib.layers.pooling import avg_pool2d, avg_pool3d, max_pool2d, max_pool3d
from meshlib.layers.positions import learned_positions, rotary, sinusoidal_positions
from meshlib.layers.projection import dense, dense_relu_dense, feed_forward
from meshlib.layers.relative import relative_position_bias
from meshlib.layers.scaling import clip_activation_gradient, us_einsum

__all__ = [
    "avg_pool2d",
    "avg_pool3d",
    "clip_activation_gradient",
    "dense",
    "dense_relu_dense",
    "dot_product_attention",
    "embedding",
    "embedding_weights",
    "feed_forward",
    "layer_norm",
    "learned_positions",
    "local_attention_1d",
    "local_attention_2d",
    "masked_local_attention_1d",
    "max_pool2d",
    "max_pool3d",
    "multihead_attention",
    "relative_position_bias",
    "rms_norm",
    "rotary",
    "sigmoid_cross_entropy_with_logits",
    "sinusoidal_positions",
    "softmax_cross_entropy_with_logits",
    "us_einsum",
]
