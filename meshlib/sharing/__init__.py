"""Models that leave the library, and weights that come in.

export   a trained model in one folder, and loaded anywhere to predict on raw input
weights  files by Hugging Face's names of Llama, GPT-2 and T5
"""

from meshlib.sharing.foreign_config import read_config as read_config
from meshlib.sharing.weights import read_weights as read_weights
from meshlib.sharing.weights import write_weights as write_weights
