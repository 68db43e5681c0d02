"""Tensors and other values from one worker to another, and plain data among all."""

from __future__ import annotations

import json
from typing import Any

import torch

from shoal.comm.group import Group
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack


def send_values(tensor: torch.Tensor, to: int, group: Group) -> None:
    """Send values to the one with this index, who knows their shape; waits until it takes them."""
    group.send(tensor.detach().cpu(), to).wait()


def receive_values(room: torch.Tensor, sender: int, group: Group) -> torch.Tensor:
    """Fill a tensor of the host, whose elements lie side by side."""
    group.receive(room, sender).wait()
    return room


def send_told(value: Any, to: int, group: Group, tag: int = 0) -> None:
    """Send a value, whose form is told with it, and go on. It arrives as it is now, whatever becomes of its
    memory: a layer that works in place may change it before it has left."""
    form = Form.of(value)
    told = form.to_bytes()
    for content in (torch.tensor([len(told)]), told, pack(form, leaves(value), copies=True)):
        group.send(content, to, tag)


def receive_told(sender: int, group: Group, tag: int = 0, *, device: str = "cpu") -> Any:
    """Wait for a value that `send_told` sends. Tensors that had a history begin a new one."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, sender, tag).wait()
    told = torch.empty(int(length), dtype=torch.uint8)
    group.receive(told, sender, tag).wait()
    message = MessageRoom(Form.from_bytes(told))
    group.receive(message.room, sender, tag).wait()
    return message.value(device)


def share_plain(value: Any, group: Group) -> list[Any]:
    """What everybody gives, by index: plain JSON data of any length."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in group.all_gather(torch.tensor([len(text)]))]
    rows = group.all_gather(torch.nn.functional.pad(text, (0, max(lengths) - len(text))))
    return [json.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]
