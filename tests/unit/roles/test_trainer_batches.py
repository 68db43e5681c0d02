"""What `Trainer.step` takes for a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.errors import TaskError
from shoal.roles.trainer.step import num_samples


def test_samples_are_the_rows_of_the_first_tensor():
    rows = torch.zeros(3, 2)
    for batch in (rows, (rows, torch.zeros(3)), [[rows], rows], {"x": (rows,), "y": 1}):
        assert num_samples(batch) == 3


@pytest.mark.parametrize("batch", ["text", None, [], {}, 5, ({},), torch.tensor(1.0)])
def test_what_has_no_rows_is_refused(batch: Any):
    with pytest.raises(TaskError, match=r"Trainer: step\(batch\) takes tensors"):
        num_samples(batch)
