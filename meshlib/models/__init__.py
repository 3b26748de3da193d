"""Transformers from one frozen config, composed of layers alone."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.models.config import TransformerConfig as TransformerConfig
    from meshlib.models.config_parts import Experts as Experts
    from meshlib.models.config_parts import LatentAttention as LatentAttention
    from meshlib.models.images.biggan import BigGANConfig as BigGANConfig
    from meshlib.models.images.biggan import discriminator as discriminator
    from meshlib.models.images.biggan import gan_samples as gan_samples
    from meshlib.models.images.biggan import gan_step as gan_step
    from meshlib.models.images.biggan import generator as generator
    from meshlib.models.images.presets import IMAGE_LAYOUTS as IMAGE_LAYOUTS
    from meshlib.models.images.presets import IMAGE_PRESETS as IMAGE_PRESETS
    from meshlib.models.images.presets import image_layout as image_layout
    from meshlib.models.images.presets import image_preset as image_preset
    from meshlib.models.images.resnet import ResNetConfig as ResNetConfig
    from meshlib.models.images.resnet import resnet as resnet
    from meshlib.models.images.retinanet import RetinaNetConfig as RetinaNetConfig
    from meshlib.models.images.retinanet import detection_outputs as detection_outputs
    from meshlib.models.images.retinanet import detection_step as detection_step
    from meshlib.models.images.retinanet import retinanet as retinanet
    from meshlib.models.images.step import image_evaluation as image_evaluation
    from meshlib.models.images.step import image_step as image_step
    from meshlib.models.images.unet import UNetConfig as UNetConfig
    from meshlib.models.images.unet import unet as unet
    from meshlib.models.images.vit import ViTConfig as ViTConfig
    from meshlib.models.images.vit import vit as vit
    from meshlib.models.layouts import LAYOUTS as LAYOUTS
    from meshlib.models.layouts import layout as layout
    from meshlib.models.layouts import usual_layouts as usual_layouts
    from meshlib.models.maxtext.run import MaxTextRun as MaxTextRun
    from meshlib.models.maxtext.run import read_maxtext as read_maxtext
    from meshlib.models.model import Transformer as Transformer
    from meshlib.models.model import transformer as transformer
    from meshlib.models.narrow import quantized_kernels as quantized_kernels
    from meshlib.models.presets import PRESETS as PRESETS
    from meshlib.models.presets import preset as preset
    from meshlib.models.serving import decode_step as decode_step
    from meshlib.models.serving import extend_step as extend_step
    from meshlib.models.serving import prefill as prefill
    from meshlib.models.stages import Pipeline as Pipeline
    from meshlib.models.train import OPTIMIZERS as OPTIMIZERS
    from meshlib.models.train import train_step as train_step
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
