"""Relay: an epoch is cut into one block per worker; each trains alone on its block and hands the model on.

While one trains, the others load the data of their own blocks. The result is bitwise that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shoal.arena import supported
from shoal.checkpoint.model_stream import TensorStream
from shoal.errors import SpecError
from shoal.model.half_range import HalfState
from shoal.model.optimizer.state import by_parameter, copied_state, counted_beside, named_state
from shoal.model.replica import Replica
from shoal.step.work import Work
from shoal.strategies.base import Fill, Setting, StepResult, WholeModel
from shoal.strategies.data.single import SingleProcess
from shoal.strategies.groups.opening import open_group
from shoal.strategies.groups.plain import broadcast_plain, receive_plain, send_plain


class RelayData(WholeModel):
    """Workers take turns. Who trains tells the others the loss of each step; who follows gets the state, too."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        self._rank, self._size = setting.world.global_rank, setting.world.world_size
        self._alone = SingleProcess()
        self._alone.open(replica, setting)
        self._step = self._state_of = replica.start.step
        self._followers = [rank for rank in range(self._size) if rank != self._rank]
        """Who has the state of the last step besides this worker, where it was the one that took it."""
        inside = "memory" if supported() else "sockets"
        self._group = open_group("auto" if setting.world.is_spread else inside, setting)

    def take(self, work: Work) -> StepResult:
        owner = self._setting.relay_owner(work.step)
        self._step = work.step
        if owner == self._rank:
            result = replace(self._alone.take(work).result(), save=work.save)
            self._state_of = work.step
            broadcast_plain(vars(result), owner, self._group)
            self._followers = [rank for rank in self._followers_of(result) if rank != owner]
            self._send_state(self._followers)
        else:
            result = StepResult(**broadcast_plain(None, owner, self._group))
            if self._rank in self._followers_of(result):
                self._take_over(owner)
        return result

    def _followers_of(self, result: StepResult) -> Sequence[int]:
        """Who needs the state after this step: who trains next, or all if nobody does."""
        is_last = result.stop or self._step == self._setting.extent.total_steps
        return range(self._size) if is_last else [self._setting.relay_owner(self._step + 1)]

    def _send_state(self, peers: Sequence[int]) -> None:
        """Parameters, buffers and optimizer state as they are now, one tensor after the other."""
        if not peers:
            return
        self._check_state()
        model, state = self._replica.module.state_dict(), named_state(self._replica)
        about = {
            "model": list(model),
            "state": [[path, _name(one.dtype), list(one.shape)] for path, one in state.items()],
            "precision": list(self._replica.precision.state.values),
        }
        for peer in peers:
            send_plain(about, peer, self._group)
            for tensor in (*model.values(), *state.values()):
                self._group.send(tensor.detach().cpu().contiguous(), peer).wait()

    def _check_state(self) -> None:
        optimizer = self._replica.optimizer
        for name, param in self._replica.trained.items():
            for key, value in optimizer.state.get(param, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise SpecError(
                        f"data: partition=relay hands on tensors, but {type(optimizer).__name__} keeps {key} of "
                        f"{name} as {type(value).__name__}; use another optimizer."
                    )

    def _take_over(self, owner: int) -> None:
        """Go on from the state of another worker."""
        replica, about = self._replica, receive_plain(owner, self._group)
        own = replica.module.state_dict()
        with torch.no_grad():
            for name in about["model"]:
                own[name].copy_(self._receive(own[name].dtype, own[name].shape, owner))
        for param in replica.trained.values():
            replica.optimizer.state.pop(param, None)  # what it was makes room for what comes
        beside = counted_beside(replica.optimizer)
        for path, dtype, shape in about["state"]:
            value = self._receive(getattr(torch, dtype), shape, owner)
            for name, keys in by_parameter({path: value}).items():
                param = replica.trained[name]
                replica.optimizer.state[param] |= copied_state(param, keys, counts_beside=id(param) in beside)
        replica.precision.adopt(HalfState.of(about["precision"]))
        self._state_of = self._step

    def _receive(self, dtype: torch.dtype, shape: Sequence[int], owner: int) -> torch.Tensor:
        room = torch.empty(tuple(shape), dtype=dtype)
        self._group.receive(room, owner).wait()
        return room

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        self.settle()
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, self._rank)
        return self._group.all_reduce_(table)  # each row is somebody's, and zero elsewhere

    def settle(self) -> None:
        """Everybody gets the state of the last step."""
        self._share(list(range(self._size)))

    def _share(self, ranks: list[int]) -> None:
        """These get the state of the last step, where they do not have it. All call this together."""
        if self._state_of < self._step:
            if self._rank in ranks:
                self._take_over(self._setting.relay_owner(self._step))
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
        self._group.close()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
