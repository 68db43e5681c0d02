"""Handwritten digits, as they come with scikit-learn."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import SpecError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch.utils.data import TensorDataset

_TEST_DIGITS = 360
_SPLIT_SEED = 0


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits as (train, test): 64 brightnesses from 0 to 1, and the class 0 to 9.

    1437 and 360 samples, always the same ones.
    """
    import torch
    from torch.utils.data import TensorDataset

    rows = _rows()
    inputs = torch.from_numpy(rows[:, :-1]).to(torch.float32) / 16
    targets = torch.from_numpy(rows[:, -1]).to(torch.int64)
    # The samples lie in the order of the people who wrote them: without mixing, test writers are strangers.
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    train, test = order[:-_TEST_DIGITS], order[-_TEST_DIGITS:]
    return TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[test], targets[test])


def digits_images() -> tuple[TensorDataset, TensorDataset]:
    """The same digits as images of shape 1 x 8 x 8."""
    from torch.utils.data import TensorDataset

    train, test = (
        TensorDataset(inputs.reshape(-1, 1, 8, 8), targets)
        for inputs, targets in (part.tensors for part in digits())
    )
    return train, test


def _rows() -> NDArray[np.float64]:
    """A row for each digit: 64 brightnesses from 0 to 16, and the class."""
    import numpy as np

    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise SpecError(
            "datasets.digits: the digits come with scikit-learn, which is not installed; "
            "run `pip install shoal[sklearn]`."
        )
    # To import scikit-learn takes every process a second or two, to read its file no time at all.
    table = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if table.exists():
        with gzip.open(table, "rt") as lines:
            return np.loadtxt(lines, delimiter=",")
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    return np.column_stack([pixels, classes])
