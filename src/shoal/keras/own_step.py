"""Models with a `train_step` of their own: each process runs it on its rows of a batch.

What such a step computes nobody can know, but it updates by its optimizers. So where one of them applies
gradients, these are first added up over all processes; what the step adds to metrics, and what it moves besides
(statistics of BatchNorm), is added up when it is done. All processes have the same sums: their models stay equal,
bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shoal.comm.group import Group
from shoal.keras.audience import Audience
from shoal.keras.batches import own_rows
from shoal.keras.installed import load_keras, set_seed
from shoal.roles.process.joining import Fellows, orphan_watch
from shoal.spec import World
from shoal.spec.conduct import Conduct, even_fills
from shoal.strategies.base import Company, Setting
from shoal.strategies.groups.opening import open_group


class OwnStepFit:
    """Keras's own loop around the model's own step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own_fit, self._own_step = model.fit, model.train_step
        self._fellows = Fellows(World.from_environment(), orphan_watch())
        world = self._fellows.gather()
        conduct = Conduct(fills=even_fills(world.world_size, world.world_size))
        company = Company(on_idle=self._fellows.look_up)
        self._group: Group = open_group("auto", Setting(world=world, conduct=conduct, company=company))
        self._share = 1.0
        """Of the rows of a batch that are this process's."""
        model.__dict__["train_step"] = self.train_step
        self._agreed: list[Any] = []
        """Optimizers that apply what all processes have come to."""
        self._let_agree()

    def fit(self, *, audience: Audience, verbose: Any, **settings: Any) -> Any:
        """As Keras's own."""
        keras = load_keras()
        began = keras.callbacks.LambdaCallback(on_train_begin=lambda *_: self._take_firsts())
        # Who shuffles draws from torch, and all must draw the same.
        torch.manual_seed(int(self._model.optimizer.iterations))
        self._let_agree()  # with another compile() other optimizers may have come
        return self._own_fit(
            callbacks=[began, *audience.callbacks], verbose=verbose if audience.is_first else 0, **settings
        )

    def close(self) -> None:
        """Leave the other processes."""
        for optimizer in self._agreed:
            optimizer.__dict__.pop("apply", None)
        self._group.close()
        self._fellows.close()

    def train_step(self, data: Any) -> Any:
        """One step of all processes on a batch that all of them have."""
        model, group = self._model, self._group
        part, own, rows = own_rows(data, len(group.ranks), group.index)
        self._share = own / rows
        drawn = torch.get_rng_state()
        self._set_seeds()
        metrics = [variable for metric in model.metrics for variable in metric.variables]
        moving = [variable for variable in model.non_trainable_variables if variable.value.is_floating_point()]
        before = [variable.value.clone() for variable in metrics]
        logs = self._own_step(part)
        torch.set_rng_state(drawn)  # a step's numbers are its own; what is shuffled next follows from fit's
        with torch.no_grad():
            self._add_up([(v.value, 1.0, old) for v, old in zip(metrics, before, strict=True)])
            self._add_up([(variable.value, self._share, None) for variable in moving])
            return self._told(logs)

    def _told(self, logs: Any) -> Any:
        """Numbers that are those of metrics, of all rows; others in the mean."""
        if not isinstance(logs, dict):
            return logs
        known = {metric.name: metric.result() for metric in self._model.metrics} | self._model.get_metrics_result()
        others = sorted(set(logs) - set(known))
        means = torch.tensor([float(logs[name]) for name in others], dtype=torch.float64)
        self._add_up([(means, self._share, None)])
        told = known | dict(zip(others, means.tolist(), strict=True))
        return {name: told[name] for name in logs}

    def _let_agree(self) -> None:
        for optimizer in optimizers_of(self._model):
            if not any(optimizer is each for each in self._agreed):
                self._agreed.append(optimizer)
                self._let_add_up(optimizer)

    def _let_add_up(self, optimizer: Any) -> None:
        own_apply = optimizer.apply

        def apply(grads: Any, trainable_variables: Any = None) -> Any:
            summed = [None if each is None else each.detach().clone() for each in grads]
            with torch.no_grad():
                self._add_up([(each, self._share, None) for each in summed if each is not None])
            return own_apply(summed, trainable_variables)

        optimizer.__dict__["apply"] = apply

    def _add_up(self, parts: Sequence[tuple[torch.Tensor, float, torch.Tensor | None]]) -> None:
        """Let each tensor become the sum over all processes of what it is times its factor; where there is an old
        value, of how far it is from that."""
        kinds: dict[torch.dtype, list[tuple[torch.Tensor, float, torch.Tensor | None]]] = {}
        for part in parts:
            kinds.setdefault(part[0].dtype, []).append(part)
        for alike in kinds.values():
            brought = [value if old is None else value - old for value, _, old in alike]
            flat = torch.cat([each.reshape(-1) * alike[n][1] for n, each in enumerate(brought)])
            self._group.all_reduce_(flat)
            for (value, _, old), found in zip(alike, flat.split([v.numel() for v, _, _ in alike]), strict=True):
                value.copy_(found.view_as(value) if old is None else old + found.view_as(value))

    def _take_firsts(self) -> None:
        """Begin with the first process's values."""
        with torch.no_grad():
            for variable in self._model.variables:
                self._group.broadcast_(variable.value.data, 0)

    def _set_seeds(self) -> None:
        """Processes draw their own numbers, and the next step others."""
        key = np.random.SeedSequence([int(self._model.optimizer.iterations), self._group.index])
        torch.manual_seed(int(key.generate_state(1)[0]))
        for layer in self._model._flatten_layers():
            for generator in getattr(layer, "_seed_generators", ()):
                set_seed(generator, int(torch.randint(2**31 - 1, ())))


def optimizers_of(model: Any) -> list[Any]:
    """The one that it was compiled with, and others that it has, as a GAN does."""
    keras = load_keras()
    found = [
        model.optimizer,
        *(each for each in vars(model).values() if isinstance(each, keras.optimizers.Optimizer)),
    ]
    return list({id(each): each for each in found if each is not None}.values())
