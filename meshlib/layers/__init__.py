"""Neural network layers, composed of operations alone.

They compute in the dtype of their input (usually bfloat16) with float32 variables, unless `numerics` says otherwise;
norms and softmax compute statistics in float32. Names and arguments follow Mesh TensorFlow where it has the layer.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.layers.attention import Held as Held
    from meshlib.layers.attention import Scores as Scores
    from meshlib.layers.attention import dot_product_attention as dot_product_attention
    from meshlib.layers.attention import multihead_attention as multihead_attention
    from meshlib.layers.convolution import avg_pool2d as avg_pool2d
    from meshlib.layers.convolution import avg_pool3d as avg_pool3d
    from meshlib.layers.convolution import conv1d as conv1d
    from meshlib.layers.convolution import conv2d as conv2d
    from meshlib.layers.convolution import conv2d_transpose as conv2d_transpose
    from meshlib.layers.convolution import conv2d_transpose_with_blocks as conv2d_transpose_with_blocks
    from meshlib.layers.convolution import conv2d_with_blocks as conv2d_with_blocks
    from meshlib.layers.convolution import conv3d as conv3d
    from meshlib.layers.convolution import conv3d_transpose as conv3d_transpose
    from meshlib.layers.convolution import conv3d_transpose_with_blocks as conv3d_transpose_with_blocks
    from meshlib.layers.convolution import conv3d_with_blocks as conv3d_with_blocks
    from meshlib.layers.convolution import max_pool2d as max_pool2d
    from meshlib.layers.convolution import max_pool3d as max_pool3d
    from meshlib.layers.embeddings import embedding as embedding
    from meshlib.layers.embeddings import embedding_weights as embedding_weights
    from meshlib.layers.experts import Mixture as Mixture
    from meshlib.layers.experts import moe as moe
    from meshlib.layers.images import conv as conv
    from meshlib.layers.images import image_attention as image_attention
    from meshlib.layers.images import separable_conv as separable_conv
    from meshlib.layers.latent import LatentDims as LatentDims
    from meshlib.layers.latent import latent_attention as latent_attention
    from meshlib.layers.latent import latent_memory as latent_memory
    from meshlib.layers.latent import latent_queries as latent_queries
    from meshlib.layers.local_attention import local_attention_1d as local_attention_1d
    from meshlib.layers.local_attention import local_attention_2d as local_attention_2d
    from meshlib.layers.local_attention import masked_local_attention_1d as masked_local_attention_1d
    from meshlib.layers.loss import focal_loss as focal_loss
    from meshlib.layers.loss import hinge_loss as hinge_loss
    from meshlib.layers.loss import sigmoid_cross_entropy_with_logits as sigmoid_cross_entropy_with_logits
    from meshlib.layers.loss import smooth_l1_loss as smooth_l1_loss
    from meshlib.layers.loss import softmax_cross_entropy_with_logits as softmax_cross_entropy_with_logits
    from meshlib.layers.norms import clip_activation_gradient as clip_activation_gradient
    from meshlib.layers.norms import layer_norm as layer_norm
    from meshlib.layers.norms import rms_norm as rms_norm
    from meshlib.layers.norms import spectral_norm as spectral_norm
    from meshlib.layers.norms import us_einsum as us_einsum
    from meshlib.layers.pipeline_schedule import schedule as schedule
    from meshlib.layers.pipeline_steps import pipeline_training_step as pipeline_training_step
    from meshlib.layers.pipelines import pipeline as pipeline
    from meshlib.layers.pipelines import split_layers as split_layers
    from meshlib.layers.pipelines import stage_layers as stage_layers
    from meshlib.layers.positions import RotaryScaling as RotaryScaling
    from meshlib.layers.positions import learned_positions as learned_positions
    from meshlib.layers.positions import relative_position_bias as relative_position_bias
    from meshlib.layers.positions import rotary as rotary
    from meshlib.layers.positions import sinusoidal_positions as sinusoidal_positions
    from meshlib.layers.projection import dense as dense
    from meshlib.layers.projection import dense_relu_dense as dense_relu_dense
    from meshlib.layers.projection import feed_forward as feed_forward
    from meshlib.layers.router import balanced_bias as balanced_bias
    from meshlib.layers.routing import Routing as Routing
    from meshlib.layers.set_norms import batch_norm as batch_norm
    from meshlib.layers.set_norms import conditional_batch_norm as conditional_batch_norm
    from meshlib.layers.set_norms import group_norm as group_norm
else:
    from meshlib.core.foreign_names import of_module as _of_module
    from meshlib.core.lazy_imports import lazy_names as _lazy_names
    from meshlib.core.public_calls import public_calls as _public_calls

    __getattr__, __dir__ = _lazy_names(__name__, _public_calls(__name__, ["meshlib.layers."]), _of_module)
