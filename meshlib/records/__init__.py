"""Record files in TensorFlow's format: `read`, `write`, and examples in them, `encode` and `decode`."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.records.conversion import make as make
    from meshlib.records.crc import crc32c as crc32c
    from meshlib.records.example import decode as decode
    from meshlib.records.example import encode as encode
    from meshlib.records.framing import Fault as Fault
    from meshlib.records.framing import read as read
    from meshlib.records.images import read_idx as read_idx
    from meshlib.records.sets import files_of as files_of
    from meshlib.records.writing import Writer as Writer
    from meshlib.records.writing import write as write
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
