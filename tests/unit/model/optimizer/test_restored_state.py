"""A saved optimizer's state goes where torch looks for it. The device without memory stands for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.model.optimizer.state import restore_state

SAVED = {"step": torch.tensor(7.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}


@pytest.mark.parametrize(
    ("settings", "counted_at"), [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta")]
)
def test_steps_are_counted_where_the_update_wants_it(settings: dict[str, bool], counted_at: str) -> None:
    param = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([param])
    optimizer.param_groups[0].update(settings)
    restore_state(optimizer, {"weight": param}, {"weight": SAVED})
    found = optimizer.state[param]
    assert {key: value.device.type for key, value in found.items()} == {
        "step": counted_at,
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }


def test_the_count_of_a_single_number_is_no_part_of_it() -> None:
    param = nn.Parameter(torch.zeros((), device="meta"))
    optimizer = torch.optim.AdamW([param])
    restore_state(
        optimizer, {"scale": param}, {"scale": {"step": torch.tensor(7.0), "exp_avg": torch.tensor(0.5)}}
    )
    assert optimizer.state[param]["step"].item() == 7.0
    assert optimizer.state[param]["exp_avg"].device.type == "meta"
