"""A strategy of somebody else's: gradients are added up over a ring, one parameter after the other."""

from dataclasses import dataclass

import torch

from shoal.model.optimizer.state import load_named_state, named_state
from shoal.spec import Claim, Conduct, StrategySpec
from shoal.spec.conduct import even_fills
from shoal.step.compute import Sums, backward_part
from shoal.strategies.base import WholeModel, step_result
from shoal.strategies.data.summing import make_summing


@dataclass(frozen=True, kw_only=True)
class Plain(StrategySpec):
    name = "plain"
    made_by = "plain_strategy:PlainSums"

    def conduct(self, cluster, slots=None):
        return Conduct(fills=even_fills(slots or cluster.places, cluster.places), can_skip=False)

    def claim(self, workers, optimizer="SGD"):
        return Claim.SUMS


class PlainSums(WholeModel):
    def __init__(self, spec, world, slots, *, replaceable=False):
        self._rank = world.global_rank

    def open(self, replica, setting):
        self._replica, self._slots = replica, setting.slots
        self._summing = make_summing("ring", setting)
        load_named_state(replica)

    def take(self, work):
        own, counts, params = Sums(), torch.zeros(self._slots), list(self._replica.trained.values())
        for param in params:
            param.grad = torch.zeros_like(param)
        for part in work.parts:
            sums = backward_part(self._replica, work, part)
            own, counts[part.slot] = own + sums, sums.samples
        control = torch.tensor([own.loss, own.weight, work.stop, *counts], dtype=torch.float64)
        for values in (control, *(param.grad.view(-1) for param in params)):
            self._summing.all_reduce_(values)
        self._replica.optimizer.step()
        loss, weight, stop, *used = control.tolist()
        return step_result(Sums(loss, weight), stop=bool(stop), counts=[int(count) for count in used])

    def exchange(self, serial, shape, fill):
        fill(table := torch.zeros(shape, dtype=torch.float64), self._rank)
        self._summing.all_reduce_(table.view(-1))
        return table

    def snapshot(self):
        return named_state(self._replica)

    def close(self):
        self._summing.close()
