"""A model whose layers are on several workers, which all work on the same batch.

How a batch is computed is the business of a `Line`: with one loss at the end, or with one for each group of
layers. Then each worker updates what it has, by the task's own optimizer: parameters of others have no gradient
here, and are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.errors import LaunchError, SpecError
from shoal.ledger.order import mix
from shoal.spec import Layer, LayerForm, World
from shoal.strategies.base import CutModel, Fill, Setting, StepResult, Work
from shoal.strategies.clipping import clip_factor
from shoal.strategies.gradients import Sums, check_weight, step_result
from shoal.strategies.half_range import Seen
from shoal.strategies.layer.decoupled import DecoupledLine
from shoal.strategies.layer.lines import Line, PlacedLine
from shoal.strategies.layer.post import open_post
from shoal.strategies.mesh.names import WholeNames
from shoal.strategies.optimizer_state import load_named_state
from shoal.strategies.replica import Replica


class LayerStrategy(CutModel):
    """Implements `layer:place=…` and `layer:decoupled=on`."""

    def __init__(self, spec: Layer) -> None:
        self._spec = spec

    def open(self, replica: Replica, setting: Setting) -> None:
        self._replica = replica
        self._setting = setting
        _check(self._spec, replica)
        self._losses = list(replica.start.losses)
        self._names = WholeNames(replica)
        self._post = post = open_post(setting)
        for param in replica.module.parameters():
            post.broadcast_(param.data)
        self._line = self._make_line()
        users = self._line.owners()
        self._tensors = replica.module.state_dict(keep_vars=True)
        self._owners = {name: users.get(id(self._tensors[name]), (0,)) for name in self._names.distinct}
        load_named_state(replica)
        self._forget_others()
        replica.precision.bind(replica.module, report=setting.report if setting.world.is_first else None)
        self._report()

    def _make_line(self) -> Line:
        if self._spec.form is LayerForm.DECOUPLED:
            weights = self._spec.loss_weights(self._post.size)
            return DecoupledLine(self._replica, self._post, weights, self._setting.sample)
        return PlacedLine(self._replica, self._post, self._spec.homes)

    def _forget_others(self) -> None:
        """Keep of parameters that only others use no more than their looks, and no state."""
        self._own = {name: self._tensors[name] for name, users in self._owners.items() if self._post.rank in users}
        for name, param in {**self._replica.trained, **self._replica.untrained}.items():
            if name not in self._own:
                param.data = param.data.new_zeros(()).expand(param.shape)
                self._replica.optimizer.state.pop(param, None)
        self._trained = {name: p for name, p in self._replica.trained.items() if name in self._own}

    def _report(self) -> None:
        if self._setting.world.is_first and self._post.size > 1:
            homes = self._line.homes
            for worker in range(self._post.size):
                own = ", ".join(module for module, home in homes.items() if home == worker)
                self._setting.report(f"layer: worker {worker} has {own or 'functions alone'}")

    def step(self, work: Work) -> StepResult:
        own = self._backward(work)
        agreed = self._post.sum_(torch.tensor([own.loss, float(work.stop), float(work.save)], dtype=torch.float64))
        loss, stop, save = agreed.tolist()
        sums = Sums(loss, own.weight, samples=own.samples)  # all have read the same batches
        check_weight(work, sums)
        self._sum_shared()
        if self._scale_down(work, sums.weight):
            self._clip()
            self._replica.optimizer.step()
            self._line.update_heads()
        for param in (*self._trained.values(), *self._line.heads):
            param.grad = None
        self._losses.append(sums.mean_loss)
        return step_result(sums, stop=bool(stop), save=bool(save), counts=[int(sums.samples)])

    def _backward(self, work: Work) -> Sums:
        """This worker's gradients of all pieces of the batch; the loss only where the model's output is."""
        part = work.parts[0]
        torch.default_generator.manual_seed(mix(work.seed, work.step, self._post.rank) >> 1)
        sums, scale = Sums(), self._replica.precision.scale
        for batch, weight, samples in part.load():
            sums += Sums(samples=samples)
            if weight:  # else padding alone: it counts nothing, and its mean is not a number
                share = weight if part.total_weight is None else weight / part.total_weight
                loss = self._line.train(batch, work.step, share * scale)
                sums += Sums((loss or 0.0) * weight, weight)
        for param in self._trained.values():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        return sums

    def _sum_shared(self) -> None:
        """A parameter that several workers use gets the sum of what each found, at all of them."""
        for name, param in self._replica.trained.items():
            first, *others = self._owners[name]
            if not others or name not in self._own:
                continue
            tag = f"shared {len(self._losses)} {name}"
            if self._post.rank != first:
                self._post.send(first, tag, param.grad)
                param.grad = self._post.take(first, tag)
                continue
            for other in others:
                found = self._post.take(other, tag)
                param.grad = found if param.grad is None else param.grad if found is None else param.grad + found
            for other in others:
                self._post.send(other, tag, param.grad)

    def _scale_down(self, work: Work, weight: float) -> bool:
        """Make gradients those of the mean; whether those of all are fit for a step."""
        precision = self._replica.precision
        factor = (1.0 if work.parts[0].total_weight is not None else 1 / weight) / precision.scale
        if precision.scales:
            counted = ((name, p.grad) for name, p in self._trained.items() if self._counts(name))
            seen = precision.measure(work.step, counted)
            values = self._post.sum_(torch.tensor(seen.values, dtype=torch.float64))
            if not precision.conclude(work.step, Seen.of(values.tolist())):
                return False
        if factor != 1.0:
            torch._foreach_mul_(self._gradients(), factor)
        return True

    def _clip(self) -> None:
        """By the norm of the gradient at all workers."""
        if self._setting.clip_norm is None:
            return
        counted = [p.grad for name, p in self._trained.items() if p.grad is not None and self._counts(name)]
        counted += [p.grad for p in self._line.heads if p.grad is not None]
        squares = sum((float(torch.linalg.vector_norm(grad)) ** 2 for grad in counted), start=0.0)
        total = self._post.sum_(torch.tensor([squares], dtype=torch.float64))
        if (factor := clip_factor(total.numpy(), self._setting.clip_norm)) < 1.0:
            torch._foreach_mul_(self._gradients(), factor)

    def _counts(self, name: str) -> bool:
        """Whether this worker is the one that counts a parameter."""
        return self._owners[name][0] == self._post.rank

    def _gradients(self) -> list[torch.Tensor]:
        params = (*self._trained.values(), *self._line.heads)
        return [param.grad for param in params if param.grad is not None]

    def reform(self, world: World) -> int:
        raise LaunchError(
            f"A worker died, and with strategy={self._spec} each holds layers that nobody else has; go on from a "
            "checkpoint with --resume."
        )

    def lanes(self, world: World) -> int:
        return 1

    def infer(self, replica: Replica, inputs: Any) -> Any:
        return self._line.infer(inputs)

    def exchange(self, serial: int, shape: tuple[int, int], fill: Fill) -> torch.Tensor:
        table = torch.zeros(shape, dtype=torch.float64)
        fill(table, 0)
        if not self._line.program.has_output:
            table.zero_()  # who has the model's output speaks
        return self._post.sum_(table)

    def model_state(self, replica: Replica) -> dict[str, torch.Tensor]:
        found = {name: self._bring(name) for name in self._names.distinct}
        return self._names.with_aliases({name: tensor for name, tensor in found.items() if tensor is not None})

    def model_stream(self, replica: Replica) -> TensorStream:
        first = self._names.canonical

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name in sorted(first):
                tensor = self._bring(first[name])
                if tensor is not None:
                    yield name, tensor

        return TensorStream(looks=self._names.looks, tensors=tensors())

    def _bring(self, name: str) -> torch.Tensor | None:
        """A tensor of the model's state, at the first worker."""
        tensor = self._post.bring(self._own.get(name), self._owners[name][0])
        return None if tensor is None else tensor.detach()

    def snapshot(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, param in self._replica.trained.items():
            kept = self._replica.optimizer.state.get(param, {})
            tensors = {key: value for key, value in kept.items() if isinstance(value, torch.Tensor)}
            brought = self._post.bring(tensors, self._owners[name][0])
            found.update({f"{name}/{key}": value for key, value in (brought or {}).items()})
        return found

    def close(self) -> None:
        self._post.close()


def _check(spec: Layer, replica: Replica) -> None:
    """What cannot be done where no worker has the whole model."""
    task = replica.task
    if task.objective is not None:
        raise SpecError(
            f"Task: objective= calls the whole model, which with strategy={spec} no worker has; use loss=, or "
            "strategy data."
        )
    if task.skip_loss_below is not None:
        raise SpecError(
            f"Task: skip_loss_below leaves parts of a batch out by their loss, which with strategy={spec} one "
            "worker alone knows in time; use data."
        )
    if isinstance(replica.optimizer, torch.optim.LBFGS):
        raise SpecError(f"LBFGS works on the whole model at once, which strategy={spec} cuts; use data.")
