"""Models exported from the library, and weights imported into it."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from meshlib.sharing.exporting import export as export
    from meshlib.sharing.foreign_config import config_notes as config_notes
    from meshlib.sharing.foreign_config import read_config as read_config
    from meshlib.sharing.foreign_images import image_config_notes as image_config_notes
    from meshlib.sharing.foreign_images import read_image_config as read_image_config
    from meshlib.sharing.loading import ImageModel as ImageModel
    from meshlib.sharing.loading import Model as Model
    from meshlib.sharing.loading import OwnModel as OwnModel
    from meshlib.sharing.loading import TextModel as TextModel
    from meshlib.sharing.loading import load_model as load_model
    from meshlib.sharing.pictures import ImageInput as ImageInput
    from meshlib.sharing.weights import read_weights as read_weights
    from meshlib.sharing.weights import write_weights as write_weights
else:
    from meshlib.core.explained_calls import explained_calls as _explained_calls
    from meshlib.core.lazy_imports import lazy_names as _lazy_names

    __getattr__, __dir__ = _lazy_names(__name__, _explained_calls(__name__))
