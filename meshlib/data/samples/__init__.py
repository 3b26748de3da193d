"""Sample data without downloads: digits, shapes, scenes with boxes, text and verses; and image files of results."""

from meshlib.data.samples.drawn_shapes import CLASSES as CLASSES
from meshlib.data.samples.drawn_shapes import Scenes as Scenes
from meshlib.data.samples.drawn_shapes import draw_scenes as draw_scenes
from meshlib.data.samples.drawn_shapes import draw_shapes as draw_shapes
from meshlib.data.samples.image_folders import ImageData as ImageData
from meshlib.data.samples.image_folders import load_images as load_images
from meshlib.data.samples.image_folders import read_image as read_image
from meshlib.data.samples.mnist_digits import Digits as Digits
from meshlib.data.samples.mnist_digits import load_digits as load_digits
from meshlib.data.samples.pictures import frame as frame
from meshlib.data.samples.pictures import grid as grid
from meshlib.data.samples.pictures import write_png as write_png
from meshlib.data.samples.plain_text import Text as Text
from meshlib.data.samples.plain_text import load_text as load_text
from meshlib.data.samples.plain_text import windows as windows
from meshlib.data.samples.verse_pairs import Verses as Verses
from meshlib.data.samples.verse_pairs import load_verses as load_verses
