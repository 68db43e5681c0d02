"""Relay: an epoch is cut into one block per worker; each trains alone on its block and hands the model on.

While one trains, the others load the data of their own blocks. The result is bitwise that of one process.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.comm.codec import Message
from shoal.comm.zmq_transport import ZmqTransport
from shoal.errors import ProtocolError, SpecError
from shoal.model.half_range import HalfState
from shoal.model.optimizer.state import by_parameter, named_state
from shoal.model.replica import Replica
from shoal.step.work import Work
from shoal.strategies.base import Fill, Setting, StepResult, WholeModel
from shoal.strategies.data.single import SingleProcess
from shoal.strategies.groups.meeting import listening_address, meet

_PATIENCE_S = 300.0


class RelayData(WholeModel):
    """Workers take turns. Who trains tells the others the loss of each step; who follows gets the state, too."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        self._rank, self._size = setting.world.global_rank, setting.world.world_size
        self._alone = SingleProcess()
        self._alone.open(replica, setting)
        self._step = self._state_of = replica.start.step
        self._followers = self._others
        """Who has the state of the last step besides this worker, where it was the one that took it."""
        self._inbox: dict[int, deque[Message]] = {rank: deque() for rank in self._others}
        meeting = meet(setting)
        self._transport = ZmqTransport(
            self._rank,
            key=meeting.agree_on_key(),
            address=listening_address(setting),
            encrypt=setting.world.encrypts,
        )
        self._transport.connect(meeting.exchange_addresses(self._transport.address))

    def take(self, work: Work) -> StepResult:
        owner = self._setting.relay_owner(work.step)
        self._step = work.step
        if owner == self._rank:
            result = replace(self._alone.take(work), save=work.save)
            self._state_of = work.step
            self._hand_on(result)
        else:
            result = StepResult(**self._receive("step", owner).fields)
            if self._gets_state(self._rank, result):
                self._take_over(self._receive("state", owner))
        return result

    def _gets_state(self, rank: int, result: StepResult) -> bool:
        """Whether a worker needs the state after this step: it trains next, or nobody does."""
        is_last = result.stop or self._step == self._setting.extent.total_steps
        return is_last or self._setting.relay_owner(self._step + 1) == rank

    def _hand_on(self, result: StepResult) -> None:
        """How the step went, to all; the state, to who needs it."""
        for peer in self._others:
            self._transport.send(peer, Message("step", vars(result)))
        self._followers = [peer for peer in self._others if self._gets_state(peer, result)]
        self._send_state(self._followers)

    def _send_state(self, peers: list[int]) -> None:
        """Parameters, buffers and optimizer state as they are now."""
        if not peers:
            return
        self._check_state()
        model, state = self._replica.module.state_dict(), named_state(self._replica)
        names: dict[str, list[Any]] = {"model": list(model), "state": list(state)}
        names["precision"] = list(self._replica.precision.state.values)
        for peer in peers:
            self._transport.send(peer, Message("state", names, [*model.values(), *state.values()]))
        self._transport.flush(_PATIENCE_S)  # until then their memory must stay as it is

    def _check_state(self) -> None:
        optimizer = self._replica.optimizer
        for name, param in self._replica.trained.items():
            for key, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise SpecError(
                        f"data: partition=relay hands on tensors, but {type(optimizer).__name__} keeps {key} of "
                        f"{name} as {type(value).__name__}; use another optimizer."
                    )

    def _take_over(self, message: Message) -> None:
        """Go on from the state of another worker."""
        replica, names = self._replica, message.fields
        frames = [frame for frame in message.frames if isinstance(frame, torch.Tensor)]
        own, split = replica.module.state_dict(), len(message.fields["model"])
        with torch.no_grad():
            for name, value in zip(names["model"], frames[:split], strict=True):
                own[name].copy_(value)
        for name, keys in by_parameter(dict(zip(names["state"], frames[split:], strict=True))).items():
            param = replica.trained[name]
            replica.optimizer.state[param] = {
                key: torch.empty_like(param).copy_(value) if value.shape == param.shape else value.clone()
                for key, value in keys.items()
            }
        replica.precision.adopt(HalfState.of(names["precision"]))
        self._state_of = self._step

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank]

    def _receive(self, kind: str, sender: int) -> Message:
        """The next message of this worker; what others sent meanwhile waits for its turn."""
        if self._setting.company.on_block is not None:
            self._setting.company.on_block()
        while not self._inbox[sender]:
            peer, message = self._transport.receive(_PATIENCE_S, awaited=sender)
            self._inbox[peer].append(message)
        message = self._inbox[sender].popleft()
        if message.kind != kind:
            raise ProtocolError(f"Worker {sender} should have sent {kind!r}, but sent {message.kind!r}.")
        return message

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        self.settle()
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, self._rank)
        for peer in self._others:
            self._transport.send(peer, Message("table", {"serial": serial}, [table]))
        total = table.clone()
        for peer in self._others:
            (rows,) = self._receive("table", peer).frames
            assert isinstance(rows, torch.Tensor)
            total += rows  # each row is somebody's, and zero elsewhere
        self._transport.flush(_PATIENCE_S)
        return total

    def settle(self) -> None:
        """Everybody gets the state of the last step."""
        self._share(list(range(self._size)))

    def _share(self, ranks: list[int]) -> None:
        """These get the state of the last step, where they do not have it. All call this together."""
        if self._state_of < self._step:
            if self._rank in ranks:
                self._take_over(self._receive("state", self._setting.relay_owner(self._step)))
        elif self._step and self._setting.relay_owner(self._step) == self._rank:
            missing = [peer for peer in ranks if peer not in (self._rank, *self._followers)]
            self._send_state(missing)
            self._followers = [*self._followers, *missing]

    def model_stream(self, replica: Replica) -> TensorStream:
        """The replica's own, at the first worker."""
        self._share([0])
        return TensorStream.of(replica.module.state_dict())

    def snapshot(self) -> dict[str, torch.Tensor]:
        return named_state(self._replica)

    def close(self) -> None:
        self._transport.close()
