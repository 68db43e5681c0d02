"""Files of what metrics read: in the order of the batches, whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.errors import TaskError
from shoal.roles.inference.kept_outputs import KeptOutputs, require_tensors
from shoal.spec import World

LANES, BATCHES = 2, 5


def kept_in(folder: Path) -> KeptOutputs:
    return KeptOutputs(World(world_size=LANES, sockets=str(folder)), "outputs-1")


def batch(number: int, metric: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((2, 3), number + 0.5), torch.tensor([number, metric])


def write(kept: KeptOutputs, lane: int) -> None:
    with kept.of_lane(lane, 2) as files:
        for number in range(lane, BATCHES, LANES):
            for metric, file in enumerate(files):
                file.append(batch(number, metric))


def test_batches_come_back_in_their_order_whoever_computed_them(tmp_path: Path) -> None:
    for lane in (1, 0):  # other objects of it, as in other processes
        write(kept_in(tmp_path), lane)
    for metric in range(2):
        found = list(kept_in(tmp_path).read(metric, range(BATCHES), LANES))
        expected = [batch(number, metric) for number in range(BATCHES)]
        assert [[t.tolist() for t in both] for both in found] == [[t.tolist() for t in both] for both in expected]
    kept_in(tmp_path).remove()
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_in_the_middle_is_not_there_and_is_made_again(tmp_path: Path) -> None:
    kept = kept_in(tmp_path)

    def leave() -> None:
        with kept.of_lane(0, 2) as files:
            files[0].append(batch(4, 0))
            raise InterruptedError

    with pytest.raises(InterruptedError):
        leave()
    with pytest.raises(FileNotFoundError):
        list(kept.read(0, [0], LANES))
    write(kept, 0)
    assert next(kept.read(0, [0], LANES))[1].tolist() == [0, 0]


def test_who_has_no_output_leaves_the_files_of_those_who_have(tmp_path: Path) -> None:
    kept = kept_in(tmp_path)
    write(kept, 0)
    with kept.of_lane(0, 2):
        pass
    assert len(list(kept.read(1, [0, 2, 4], LANES))) == 3


def test_half_precision_is_kept_as_float32(tmp_path: Path) -> None:
    kept = kept_in(tmp_path)
    with kept.of_lane(0, 1) as files:
        files[0].append((torch.ones(2, dtype=torch.bfloat16), torch.ones(2).bool()))
    ((output, target),) = kept.read(0, [0], 1)
    assert output.dtype == torch.float32 and target.dtype == torch.bool


def test_only_tensors_can_be_kept() -> None:
    with pytest.raises(TaskError, match="but the model returned dict"):
        require_tensors({}, torch.zeros(1))
    with pytest.raises(TaskError, match="but the target is list"):
        require_tensors(torch.zeros(1), [])
