"""A model whose layers are on several workers, which all work on the same batch.

How a batch is computed is the business of a `LayerLine`: with one loss at the end, or with one for each group of
layers. Then each worker updates what it has, by the task's own optimizer: parameters of others have no gradient
here, and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shoal.checkpoint.aside import put_aside
from shoal.checkpoint.model_stream import TensorLooks, TensorStream
from shoal.errors import SpecError
from shoal.ledger.order import mix
from shoal.model.optimizer.state import load_named_state, state_by_name
from shoal.model.replica import Replica
from shoal.spec import Layer, LayerForm
from shoal.step.compute import Sums, check_finite, check_weight, seed_slot
from shoal.step.update import Update
from shoal.step.work import Work
from shoal.strategies.base import Fill, Lockstep, Setting, StepResult, step_result
from shoal.strategies.cut.loss_names import learn_names
from shoal.strategies.cut.names import WholeNames
from shoal.strategies.cut.wires import receive_told, receive_values, send_told, send_values
from shoal.strategies.groups.opening import open_group
from shoal.strategies.groups.plain import share_plain
from shoal.strategies.layer.decoupled import DecoupledLine
from shoal.strategies.layer.lines import LayerLine, PlacedLine


class LayerStrategy(Lockstep):
    """Implements `layer:place=…` and `layer:decoupled=on`."""

    def __init__(self, spec: Layer) -> None:
        self._spec = spec

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        _check(self._spec, replica)
        self._names = WholeNames(replica)
        self._group = group = open_group(_form(self._spec, setting), setting)
        self._update = Update(replica, setting.clip_norm, group.all_reduce_)
        for param in replica.module.parameters():
            group.broadcast_(param.data)
        self._line = self._make_line()
        users, tensors = self._line.owners(), replica.module.state_dict(keep_vars=True)
        self._owners = {name: users.get(id(tensors[name]), (0,)) for name in self._names.distinct}
        self._own = {name: tensors[name] for name, workers in self._owners.items() if group.index in workers}
        load_named_state(replica)
        self._forget_others()
        self._updated = {name: p for name, p in replica.trained.items() if name in self._own}
        """Parameters that move here: those of the model, and those of a head."""
        if self._line.head is not None:
            self._updated |= put_aside(self._line.head.params)
        replica.precision.bind(replica.module, report=setting.company.report if setting.world.is_first else None)
        self._report()

    def _make_line(self) -> LayerLine:
        if self._spec.form is LayerForm.DECOUPLED:
            weights = self._spec.loss_weights(self._group.size)
            return DecoupledLine(self._replica, self._group, weights, self._setting.supply)
        return PlacedLine(self._replica, self._group, self._spec.homes)

    def _forget_others(self) -> None:
        """Keep of parameters that only others use no more than their looks, and no state."""
        for name, param in {**self._replica.trained, **self._replica.untrained}.items():
            if name not in self._own:
                param.data = param.data.new_zeros(()).expand(param.shape)
                self._replica.optimizer.state.pop(param, None)

    def _report(self) -> None:
        head, start = self._line.head, self._replica.start
        if head is not None and start.step and not head.was_saved:
            self._setting.company.report(
                f"layer: the checkpoint has no head that reads {head.reads}, so it begins anew"
            )
        if self._setting.world.is_first and self._group.size > 1:
            homes = self._line.homes
            for worker in range(self._group.size):
                own = ", ".join(module for module, home in homes.items() if home == worker)
                self._setting.company.report(f"layer: worker {worker} has {own or 'functions alone'}")

    def take(self, work: Work) -> StepResult:
        own = self._backward(work)
        flags = [float(work.stop), float(work.save), float(len(own.parts))]
        said = torch.tensor([own.loss, *flags, *own.all_parts], dtype=torch.float64)
        loss, stop, save, has_parts, *parts = self._group.all_reduce_(said).tolist()
        if has_parts:
            learn_names(self._replica.loss_parts, self._group)
        # All have read the same batches.
        sums = Sums(loss, own.weight, samples=own.samples, parts=tuple(parts))
        check_weight(work, sums)
        self._sum_shared()
        if self._update.scale_and_check(work, sums.weight, self._gradients(), self._counted().items()):
            self._update.clip(list(self._updated.values()), self._counted().values())
            self._replica.optimizer.step()
            if self._line.head is not None:
                self._line.head.step()
        for param in self._updated.values():
            param.grad = None
        names = self._replica.loss_parts.names
        return step_result(sums, stop=bool(stop), save=bool(save), counts=[int(sums.samples)], names=names)

    def _backward(self, work: Work) -> Sums:
        """This worker's gradients of all pieces of the batch; the loss only where the model's output is."""
        part = work.parts[0]
        seed_slot(work, self._group.index, self._replica.device)  # each worker draws its own numbers
        sums, scale = Sums(), self._replica.precision.scale
        for number, (batch, weight, samples) in enumerate(part.load()):
            sums += Sums(samples=samples)
            if weight:  # else padding alone: it counts nothing, and its mean is not a number
                share = weight if part.total_weight is None else weight / part.total_weight
                key = mix(work.seed, work.step, number) >> 1  # of what an objective draws, at every worker
                told = self._line.train(batch, work.step, share * scale, key)
                found = Sums(weight=weight)
                if told is not None:
                    check_finite(told.loss.item(), work, part)
                    found = told.weighted(weight) if self._line.program.has_output else found
                sums += found
        for param in self._updated.values():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        return sums

    def _sum_shared(self) -> None:
        """A parameter that several workers use gets the sum of what each found, at all of them."""
        group, device = self._group, self._replica.device
        for name, param in self._replica.trained.items():
            first, *others = self._owners[name]
            if not others or name not in self._own:
                continue
            if group.index != first:
                send_told(param.grad, first, group)
                param.grad = receive_told(first, group, device=device)
                continue
            for other in others:
                found = receive_told(other, group, device=device)
                param.grad = found if param.grad is None else param.grad if found is None else param.grad + found
            for other in others:
                send_told(param.grad, other, group)

    def _gradients(self) -> list[torch.Tensor]:
        return [param.grad for param in self._updated.values() if param.grad is not None]

    def _counted(self) -> dict[str, torch.Tensor]:
        """Gradients by name, without those that another worker has, too, and counts."""
        others = {name for name, users in self._owners.items() if users[0] != self._group.index}
        return {name: p.grad for name, p in self._updated.items() if p.grad is not None and name not in others}

    def infer(self, replica: Replica, inputs: Any) -> Any:
        return self._line.infer(inputs)

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, 0)
        if not self._line.program.has_output:
            table.zero_()  # who has the model's output speaks
        return self._group.all_reduce_(table)

    def model_stream(self, replica: Replica) -> TensorStream:
        names = self._names
        own = {name: self._own[first] for name, first in names.canonical.items() if first in self._own}
        homes = {name: self._owners[first][0] for name, first in names.canonical.items()}
        tensors = self._bring_all(own, names.looks, homes)
        return TensorStream(looks=names.looks, tensors=tensors, same=names.canonical)

    def state_stream(self) -> TensorStream:
        trained = {
            name: p for name, p in self._replica.trained.items() if self._owners[name][0] == self._group.index
        }
        own = state_by_name(self._replica.optimizer, trained)
        if self._line.head is not None:
            own |= put_aside(self._line.head.state())
        about = {path: [str(value.dtype), list(value.shape)] for path, value in own.items()}
        told = share_plain(about, self._group)
        homes = {path: rank for rank, each in enumerate(told) for path in each}
        looks = {
            path: TensorLooks(dtype=getattr(torch, dtype.removeprefix("torch.")), shape=tuple(shape))
            for each in told
            for path, (dtype, shape) in each.items()
        }
        return TensorStream(looks=looks, tensors=self._bring_all(own, looks, homes))

    def _bring_all(
        self, own: Mapping[str, torch.Tensor], looks: Mapping[str, TensorLooks], homes: Mapping[str, int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """One tensor after the other, in the order of their names, at the first worker: it asks for each when it
        wants it, so that it never has more than one that is not its own."""
        group, asking = self._group, torch.zeros(1)
        for name in sorted(homes):
            owner = homes[name]
            if group.is_first and owner:
                group.send(asking, owner)
                yield name, receive_values(looks[name].room(), owner, group)
            elif group.is_first:
                yield name, own[name].detach()
            elif group.index == owner:
                receive_values(asking, 0, group)
                send_values(own[name], 0, group)

    def close(self) -> None:
        self._group.close()


def _form(spec: Layer, setting: Setting) -> str:
    """Through memory, for values pass through the host's anyway; over sockets where a port was fixed for them."""
    if spec.via != "auto":
        return spec.via
    return "memory" if setting.port is None else "sockets"


def _check(spec: Layer, replica: Replica) -> None:
    """What cannot be done where no worker has the whole model."""
    if isinstance(replica.optimizer, torch.optim.LBFGS):
        raise SpecError(f"LBFGS works on the whole model at once, which strategy={spec} cuts; use data.")
