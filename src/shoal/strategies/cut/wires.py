"""Tensors and other values from one worker to another."""

from __future__ import annotations

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
