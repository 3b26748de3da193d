"""Input pipelines from files and arrays to batches, in an order determined by seed and position alone.

data = mtf.data.records("train@10", {"image": mtf.data.Field("uint8", (28, 28)), "label": mtf.data.Field("int32")})
data = data.shuffle(seed=0).map(scaled, workers=2).batch(128).repeat().prefetch(2)
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.data import samples as samples
    from meshlib.data.feed import Feed as Feed
    from meshlib.data.feed import Stats as Stats
    from meshlib.data.openers import Field as Field
    from meshlib.data.openers import arrays as arrays
    from meshlib.data.openers import folder as folder
    from meshlib.data.openers import idx as idx
    from meshlib.data.openers import records as records
    from meshlib.data.openers import text as text
    from meshlib.data.pipeline import Data as Data
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
