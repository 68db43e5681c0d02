"""Plain data among the processes of a group: JSON of any length."""

from __future__ import annotations

import json
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.comm.group.base import Transfer


def share_plain(value: Any, group: Group) -> list[Any]:
    """What everybody gives, by index."""
    text = _written(value)
    lengths = [int(length) for length in group.all_gather(torch.tensor([len(text)]))]
    rows = group.all_gather(torch.nn.functional.pad(text, (0, max(lengths) - len(text))))
    return [_read(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_plain(value: Any, index: int, group: Group) -> Any:
    """What the one with this index gives, to all."""
    if group.index != index:
        length = group.broadcast_(torch.zeros(1, dtype=torch.int64), index)
        return _read(group.broadcast_(torch.empty(int(length), dtype=torch.uint8), index))
    text = _written(value)
    group.broadcast_(torch.tensor([len(text)]), index)
    group.broadcast_(text, index)
    return value


def send_plain(value: Any, to: int, group: Group) -> None:
    """Send it to the one with this index; waits until it is taken."""
    for transfer in put_plain(value, to, group):
        transfer.wait()


def put_plain(value: Any, to: int, group: Group, tag: int = 0) -> list[Transfer]:
    """Put it on its way to the one with this index, and go on."""
    text = _written(value)
    return [group.send(torch.tensor([len(text)]), to, tag), group.send(text, to, tag)]


def receive_plain(sender: int, group: Group, tag: int = 0) -> Any:
    """Wait for what was sent under this tag."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, sender, tag).wait()
    text = torch.empty(int(length), dtype=torch.uint8)
    group.receive(text, sender, tag).wait()
    return _read(text)


def _written(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _read(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())
