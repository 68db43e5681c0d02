"""Tasks of modules of Lightning's: those that say how to train themselves in `training_step` and
`configure_optimizers`. The library itself is not needed here."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from shoal.errors import TaskError
from shoal.spec.checks import require_callable
from shoal.spec.task import Task

_OWNER = "Task.from_lightning"


def make_task(module: Callable[[], Any], train: Any = None, **fields: Any) -> Task:
    """See `Task.from_lightning`."""
    require_callable(_OWNER, "module", module, "lambda: MyModule(width=64)")
    if hasattr(module, "training_step") and not isinstance(module, type):
        raise TaskError(
            f"{_OWNER}: every process makes the module for itself, but found one that is made "
            f"({type(module).__name__}); write lambda: {type(module).__name__}(…), or name the class."
        )
    made = LightningParts(module, scheduled="scheduler" in fields)
    if train is None:
        train = made.loader()
    return Task(
        model=made.make,
        objective=made.loss,
        train=train,
        **{"optimizer": made.optimizer, **fields},
    )


class LightningParts:
    """What a module says of its own training, in the words of a task."""

    def __init__(self, make: Callable[[], Any], *, scheduled: bool) -> None:
        """`scheduled`: the task has a scheduler of its own."""
        self._make = make
        self._scheduled = scheduled
        self._takes_number = True
        """Whether `training_step` has a place for the batch's number, which Lightning leaves to it."""
        self._made: list[weakref.ref[Any]] = []

    def make(self) -> Any:
        module = self._make()
        if not callable(getattr(module, "training_step", None)):
            raise TaskError(
                f"{_OWNER}: {type(module).__name__} has no training_step, to compute the loss of a batch; give "
                "it one, or use Task with loss= or objective=."
            )
        if not getattr(module, "automatic_optimization", True):
            raise TaskError(
                f"{_OWNER}: {type(module).__name__} optimizes by hand (automatic_optimization=False), which only "
                "its own loop can do; let training_step return the loss, or use Trainer.step."
            )
        self._takes_number = _has_room_for_two(module.training_step)
        module.log = module.log_dict = _say_nothing  # there is no trainer of its own to tell it to
        self._made = [ref for ref in self._made if ref() is not None] + [weakref.ref(module)]
        return module

    def loader(self) -> Any:
        """The module's own data."""
        module = self.make()
        if not callable(getattr(module, "train_dataloader", None)):
            raise TaskError(f"{_OWNER}: {type(module).__name__} has no train_dataloader; set train=.")
        return module.train_dataloader()

    def loss(self, model: Any, batch: Any) -> Any:
        """Of any batch, whether it is trained on or evaluated."""
        found = model.training_step(batch, 0) if self._takes_number else model.training_step(batch)
        loss = found.get("loss") if isinstance(found, Mapping) else found
        if loss is None:
            raise TaskError(
                f"{_OWNER}: training_step returned no loss; let it return a tensor, or a dict with 'loss'."
            )
        return loss

    def optimizer(self, params: Any) -> Any:
        """The one that the module which has these parameters makes for itself."""
        params = list(params)
        owners = [module for ref in self._made if (module := ref()) is not None and _has(module, params[0])]
        if not owners:
            raise TaskError(
                f"{_OWNER}: configure_optimizers makes an optimizer for the whole module, but one is needed for "
                "layers besides; set optimizer=lambda params: …."
            )
        return self._only_optimizer(owners[-1].configure_optimizers())

    def _only_optimizer(self, found: Any) -> Any:
        schedulers: Any = None
        if isinstance(found, Mapping):
            found, schedulers = found.get("optimizer"), found.get("lr_scheduler")
        elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list):
            found, schedulers = found
        if isinstance(found, (list, tuple)) and len(found) == 1:
            found = found[0]
        if found is None or isinstance(found, (list, tuple)):
            count = "none" if found is None else str(len(found))
            raise TaskError(
                f"{_OWNER}: configure_optimizers must make one optimizer, found {count}; return one, or set "
                "optimizer=lambda params: …."
            )
        if schedulers and not self._scheduled:
            raise TaskError(
                f"{_OWNER}: configure_optimizers makes a scheduler, too, which Lightning steps after an epoch and "
                "Shoal after every step; set scheduler=lambda optimizer: … by steps, or scheduler=None."
            )
        return found


def _has(module: Any, param: Any) -> bool:
    return any(param is own for own in module.parameters())


def _has_room_for_two(function: Callable[..., Any]) -> bool:
    params = inspect.signature(function).parameters.values()
    return len(params) > 1 or any(param.kind is param.VAR_POSITIONAL for param in params)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    """In place of Lightning's `log`."""
