"""Data sets: small ones that need no download, and ways to read those of one's own."""

from shoal.datasets.counted import Counted
from shoal.datasets.folds import KFold
from shoal.datasets.handwritten import digits, digits_images
from shoal.datasets.in_parts import InParts
from shoal.datasets.saved_table import SavedTable, from_spark
from shoal.datasets.shipped import Shipped
from shoal.datasets.stream import Stream
from shoal.datasets.text import NUM_BYTES, TextBlocks, python_text

__all__ = [
    "NUM_BYTES",
    "Counted",
    "InParts",
    "KFold",
    "SavedTable",
    "Shipped",
    "Stream",
    "TextBlocks",
    "digits",
    "digits_images",
    "from_spark",
    "python_text",
]
