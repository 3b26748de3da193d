"""Tokenisation: byte pairs, and text-to-text examples."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.data.vocabulary.bytepairs import BytePairs as BytePairs
    from meshlib.data.vocabulary.text_pairs import TextExamples as TextExamples
    from meshlib.data.vocabulary.text_pairs import text_to_text as text_to_text
    from meshlib.data.vocabulary.text_pairs import texts_in_rows as texts_in_rows
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
