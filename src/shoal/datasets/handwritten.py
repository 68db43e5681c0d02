"""Handwritten digits, as they come with scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.errors import SpecError

if TYPE_CHECKING:
    from torch.utils.data import TensorDataset

_TEST_DIGITS = 360
_SPLIT_SEED = 0


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Handwritten digits as (train, test): 64 brightnesses from 0 to 1, and the class 0 to 9.

    1437 and 360 samples, always the same ones.
    """
    import torch
    from torch.utils.data import TensorDataset

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SpecError(
            "datasets.digits: the digits come with scikit-learn, which is not installed; "
            "run `pip install shoal[sklearn]`."
        ) from error
    pixels, classes = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).to(torch.float32) / 16
    targets = torch.from_numpy(classes).to(torch.int64)
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
