"""Tensors from one worker to another, and plain data among all."""

from __future__ import annotations

import json
from typing import Any

import torch

from shoal.comm.group import Group


def send_values(tensor: torch.Tensor, to: int, group: Group) -> None:
    """Send values to the one with this index, who knows their shape; waits until it takes them."""
    group.send(tensor.detach().cpu(), to).wait()


def receive_values(room: torch.Tensor, sender: int, group: Group) -> torch.Tensor:
    """Fill a tensor of the host, whose elements lie side by side."""
    group.receive(room, sender).wait()
    return room


def share_plain(value: Any, group: Group) -> list[Any]:
    """What everybody gives, by index: plain JSON data of any length."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in group.all_gather(torch.tensor([len(text)]))]
    rows = group.all_gather(torch.nn.functional.pad(text, (0, max(lengths) - len(text))))
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]
