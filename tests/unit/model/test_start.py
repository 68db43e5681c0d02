"""What a run begins from."""

import pytest
import torch

from shoal.errors import CheckpointError
from shoal.model.start import Start

ONE = {"weight": torch.ones(2)}
TWO = {f"ensemble_members.{member}.weight": torch.full((2,), float(member)) for member in range(2)}


def test_an_ensemble_gives_each_worker_a_member():
    start = Start(step=3, model=TWO).with_members(is_ensemble=True)
    assert [each["weight"].tolist() for each in start.members] == [[0, 0], [1, 1]]
    assert start.model == start.members[0]


def test_what_one_model_and_an_ensemble_cannot_go_on_with_is_told():
    with pytest.raises(
        CheckpointError, match="an ensemble, and only average goes on with one: resume it with combine=ensemble"
    ):
        Start(step=3, model=TWO).with_members(is_ensemble=False)
    with pytest.raises(CheckpointError, match=r"one model, .* resume it with combine=mean"):
        Start(step=3, model=ONE).with_members(is_ensemble=True)
    for model, is_ensemble in ((ONE, True), (TWO, False)):  # weights alone are anybody's
        start = Start(model=model)
        assert start.with_members(is_ensemble=is_ensemble) == start
