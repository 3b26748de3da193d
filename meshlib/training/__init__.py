"""Training: `mtf.train`, the training loop."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.training.evaluation import Evaluation as Evaluation
    from meshlib.training.history import History as History
    from meshlib.training.history import read_history as read_history
    from meshlib.training.loop import Trained as Trained
    from meshlib.training.loop import train as train
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
