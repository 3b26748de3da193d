"""Text generation: prompts are read into caches, then tokens are sampled one by one."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.generation.generator import Generated as Generated
    from meshlib.generation.generator import Generator as Generator
    from meshlib.generation.generator import generate as generate
    from meshlib.generation.server import Completion as Completion
    from meshlib.generation.server import Server as Server
    from meshlib.generation.tokens import ByteTokenizer as ByteTokenizer
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
