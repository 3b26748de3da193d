"""Text from a trained model: prompts are read into caches, then tokens are drawn one by one.

generator  the programs of a prefill and of a step, and the loop over tokens
beams      beam search, on the host
tokens     text as tokens, and what ends a completion
"""

from meshlib.generation.generator import Generated as Generated
from meshlib.generation.generator import Generator as Generator
from meshlib.generation.generator import generate as generate
from meshlib.generation.tokens import ByteTokenizer as ByteTokenizer
