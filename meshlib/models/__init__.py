"""Transformers from one frozen config, written in layers alone.

config   TransformerConfig: dimensions, parts and numerics
presets  the published ones by name
counts   parameters and FLOPs in closed form
"""

from meshlib.models.config import TransformerConfig as TransformerConfig
from meshlib.models.layouts import LAYOUTS as LAYOUTS
from meshlib.models.layouts import layout as layout
from meshlib.models.model import Transformer as Transformer
from meshlib.models.model import transformer as transformer
from meshlib.models.presets import PRESETS as PRESETS
from meshlib.models.presets import preset as preset
from meshlib.models.train import OPTIMIZERS as OPTIMIZERS
from meshlib.models.train import train_step as train_step
