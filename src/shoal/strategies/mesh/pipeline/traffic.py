"""Messages between neighbouring stages: sent without waiting, and received ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.comm.group import Group, Transfer
from shoal.errors import TaskError
from shoal.layout.schedules import StageSchedule
from shoal.strategies.cut.packing import Form, MessageRoom, leaves, pack

_LENGTH, _HEADER, _VALUES, _GRADIENTS = range(4)
"""Kinds of messages between two stages."""


@dataclass(frozen=True)
class Crossing:
    """One micro-batch on its way into a stage, or its gradients on their way back out of it."""

    stage: int
    """The later one of the two."""
    number: int
    """Of the micro-batch."""
    shape: Hashable
    """Of what the model was given, and the kinds of numbers: these decide the form of all messages that follow."""
    back: bool = False


class Traffic:
    """What this worker sends to and receives from its neighbours."""

    def __init__(self, line: Group, schedule: StageSchedule) -> None:
        self.waited_s = 0.0
        """How long this worker has waited for messages."""
        self._line = line
        self._schedule = schedule
        self._forms: dict[tuple[int, Hashable], Form] = {}
        self._expected: dict[Crossing, tuple[MessageRoom, Transfer]] = {}
        self._sent: dict[Crossing, list[Transfer]] = {}

    def send(self, crossing: Crossing, values: Sequence[Any]) -> None:
        """Send values to the next stage, or gradients to the one before."""
        if crossing.back:
            self._send(pack(self._form(crossing), values), crossing.stage - 1, crossing, _GRADIENTS)
        else:
            form = self._tell_form(crossing, Form.of(values))
            self._send(pack(form, leaves(values)), crossing.stage, crossing, _VALUES)

    def expect(self, crossing: Crossing) -> None:
        """Make room for a message that will be needed, if its form is known."""
        known = (crossing.stage, crossing.shape) in self._forms
        if not known or crossing in self._expected:
            return
        parcel = MessageRoom(self._form(crossing))
        sender, kind = (crossing.stage, _GRADIENTS) if crossing.back else (crossing.stage - 1, _VALUES)
        self._expected[crossing] = parcel, self._receive(parcel.room, sender, crossing, kind)

    def receive(self, crossing: Crossing, device: str) -> Sequence[Any]:
        """Wait for a message."""
        if (crossing.stage, crossing.shape) not in self._forms:
            self._learn_form(crossing)
        self.expect(crossing)
        parcel, transfer = self._expected.pop(crossing)
        self._wait(transfer)
        if crossing.back:
            self._let_go(replace(crossing, back=False))  # whose gradients these are has been taken
        values: Sequence[Any] = parcel.value(device)
        return values

    def settle(self) -> None:
        """Wait until all that was sent has been taken."""
        for crossing in list(self._sent):
            self._let_go(crossing)

    def _let_go(self, crossing: Crossing) -> None:
        for transfer in self._sent.pop(crossing, ()):
            transfer.wait()

    def _form(self, crossing: Crossing) -> Form:
        form = self._forms[crossing.stage, crossing.shape]
        return form.differentiable if crossing.back else form

    def _tell_form(self, crossing: Crossing, form: Form) -> Form:
        known = self._forms.setdefault((crossing.stage, crossing.shape), form)
        if known is form:
            told = form.to_bytes()
            self._send(torch.tensor([len(told)]), crossing.stage, crossing, _LENGTH)
            self._send(told, crossing.stage, crossing, _HEADER)
        elif known != form:
            raise TaskError(
                f"Task: stage {crossing.stage - 1} of the pipeline has sent {known.items} and now, for inputs of "
                f"the same shape, {form.items}; use sharded or data for models whose shapes depend on values."
            )
        return known

    def _learn_form(self, crossing: Crossing) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait(self._receive(length, crossing.stage - 1, crossing, _LENGTH))
        told = torch.empty(int(length), dtype=torch.uint8)
        self._wait(self._receive(told, crossing.stage - 1, crossing, _HEADER))
        self._forms[crossing.stage, crossing.shape] = Form.from_bytes(told)

    def _tag(self, crossing: Crossing, kind: int) -> int:
        return (crossing.number * self._schedule.num_stages + crossing.stage) * 4 + kind

    def _send(self, content: torch.Tensor, stage: int, crossing: Crossing, kind: int) -> None:
        transfer = self._line.send(content, self._schedule.worker_of(stage), self._tag(crossing, kind))
        self._sent.setdefault(crossing, []).append(transfer)

    def _receive(self, room: torch.Tensor, stage: int, crossing: Crossing, kind: int) -> Transfer:
        return self._line.receive(room, self._schedule.worker_of(stage), self._tag(crossing, kind))

    def _wait(self, transfer: Transfer) -> None:
        began = time.perf_counter()
        transfer.wait()
        self.waited_s += time.perf_counter() - began
