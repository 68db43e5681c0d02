"""A Trainer's state, saved and loaded: what goes on from it is, bit by bit, what was never interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import every_way
import pytest
import torch
from every_way import INPUTS, TARGETS

from helpers.forked import in_processes
from shoal.checkpoint.listing import read_manifest
from shoal.checkpoint.model_file import digest, load_tensors
from shoal.errors import CheckpointError, ShoalError, SpecError
from shoal.roles.loading.start import load_weights
from shoal.roles.trainer.trainer import Trainer
from shoal.spec import World

HALF, WHOLE = 5, 10
STEPPED = ("data:via=arena", "data:via=ring", "sharded", "tensor")
FITTED = ("pipeline:split=3+3", "data:partition=relay")
"""These take no batches from outside."""


def each_with_one_optimizer(strategies: tuple[str, ...]) -> list[Any]:
    """In turn; with the other one where tests need not be quick."""
    pairs = [(strategy, ("momentum", "adamw")[number % 2]) for number, strategy in enumerate(strategies)]
    others = [(strategy, ("adamw", "momentum")[number % 2]) for number, strategy in enumerate(strategies)]
    return [*pairs, *(pytest.param(*other, marks=pytest.mark.long) for other in others)]


def told(trainer: Trainer) -> dict[str, Any]:
    """Where a Trainer is, as plain data: of the tensors, where they are, their digests."""
    state = trainer.state_dict()
    parts = {part: digest(state[part]) for part in ("model", "optimizer")}
    return {"step": state["step"], "losses": state["losses"], "lr": trainer.lr, **parts}


def take_steps(trainer: Trainer, count: int) -> None:
    """Each lane has its rows of a batch that is another one in each step."""
    for _ in range(count):
        first = trainer.steps % 3 * 12
        rows = slice(first + trainer.lane, first + 12, trainer.lanes)
        trainer.step((INPUTS[rows], TARGETS[rows]))


def check(answers: list[list[dict[str, Any]]]) -> None:
    """Who went on from a folder, or from a dictionary, is where nobody had stopped."""
    for unbroken, loaded, given in answers:
        assert unbroken["step"] == WHOLE and len(set(unbroken["losses"])) == WHOLE
        assert loaded == unbroken
        assert given == unbroken
    assert digest({}) not in (answers[0][0]["model"], answers[0][0]["optimizer"])


@pytest.mark.parametrize(("strategy", "optimizer"), each_with_one_optimizer(STEPPED))
def test_steps_go_on_as_if_nobody_had_stopped(strategy: str, optimizer: str, tmp_path: Path) -> None:
    """From a folder, and from a dictionary; random numbers and learning rate go on, too."""
    folder = tmp_path / "state"

    def train(world: World) -> list[dict[str, Any]]:
        def trainer() -> Trainer:
            return Trainer(every_way.task(optimizer, dropout=0.2), strategy=strategy, world=world)

        with trainer() as unbroken:
            take_steps(unbroken, WHOLE)
            found = [told(unbroken)]
        with trainer() as first:
            take_steps(first, HALF)
            first.save(folder)
            state = first.state_dict()
            take_steps(first, 1)  # what was saved does not change
        for load in (lambda one: one.load(folder), lambda one: one.load_state_dict(state)):
            with trainer() as second:
                take_steps(second, 2)  # what was before is forgotten
                load(second)
                assert second.steps == HALF
                take_steps(second, WHOLE - HALF)
                found.append(told(second))
        return found

    check(in_processes(2, train))
    assert read_manifest(folder).step == HALF


@pytest.mark.parametrize(("strategy", "optimizer"), each_with_one_optimizer(FITTED))
def test_fit_goes_on_as_if_nobody_had_stopped(strategy: str, optimizer: str, tmp_path: Path) -> None:
    folder = tmp_path / "state"

    def train(world: World) -> list[dict[str, Any]]:
        def trainer(steps: int) -> Trainer:
            return Trainer(every_way.task(optimizer, steps, dropout=0.2), strategy=strategy, world=world)

        with trainer(WHOLE) as unbroken:
            unbroken.fit()
            found = [told(unbroken)]
        with trainer(HALF) as first:
            first.fit()
            first.save(folder)
            state = first.state_dict()
        for load in (lambda one: one.load(folder), lambda one: one.load_state_dict(state)):
            with trainer(WHOLE) as second:
                load(second)
                assert second.fit().step == WHOLE
                found.append(told(second))
        return found

    check(in_processes(2, train))


def test_a_state_of_one_strategy_is_one_of_every_other(tmp_path: Path) -> None:
    """What was trained by one process goes on in two that have a part each, as far as rounding lets it."""
    folder = tmp_path / "state"
    with Trainer(every_way.task("adamw")) as alone:
        for _ in range(HALF):
            alone.step((INPUTS, TARGETS))
        key = alone.save(folder)
        assert key == digest(alone.model.state_dict()) == digest(load_weights(folder))
        for _ in range(HALF):
            alone.step((INPUTS, TARGETS))
        expected = [alone.state_dict()["losses"], alone.lr]

    def train(world: World) -> list[Any]:
        with Trainer(every_way.task("adamw"), strategy="sharded", world=world) as trainer:
            trainer.load(folder)
            for _ in range(HALF):
                rows = slice(trainer.lane, None, 2)
                trainer.step((INPUTS[rows], TARGETS[rows]))
            return [trainer.state_dict()["losses"], trainer.lr]

    for losses, rate in in_processes(2, train):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert rate == expected[1]


def test_more_steps_than_the_task_has(tmp_path: Path) -> None:
    """Who owns the loop decides how long it is."""

    def train(world: World) -> list[Any]:
        with Trainer(every_way.task(steps=2), strategy="data:via=arena", world=world) as trainer:
            take_steps(trainer, HALF)
            trainer.save(tmp_path / "state")
            trainer.load(tmp_path / "state")
            take_steps(trainer, 1)
            return trainer.state_dict()["losses"]

    first, second = in_processes(2, train)
    assert first == second and len(first) == HALF + 1


def test_a_model_alone_gives_the_weights_and_no_steps(tmp_path: Path) -> None:
    with Trainer(every_way.task()) as trainer:
        take_steps(trainer, HALF)
        key = trainer.save(tmp_path / "model.safetensors")
    with Trainer(every_way.task()) as trainer:
        trainer.load(tmp_path / "model.safetensors")
        assert (trainer.steps, trainer.lr) == (0, 0.1)
        assert digest(trainer.model.state_dict()) == key == digest(load_tensors(tmp_path / "model.safetensors"))
        assert not trainer.state_dict()["optimizer"]


def test_a_schedule_that_follows_the_loss_goes_on(tmp_path: Path) -> None:
    """It is where it was because it sees all losses again."""

    def plateau(optimizer: torch.optim.Optimizer) -> Any:
        # Only a loss of a tenth would count as better.
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.9)

    the_task = replace(every_way.task(), scheduler=plateau)

    def rates(trainer: Trainer) -> list[float]:
        found = []
        for _ in range(3):
            take_steps(trainer, 1)
            found.append(trainer.lr)
        return found

    with Trainer(the_task) as trainer:
        rates(trainer)
        trainer.save(tmp_path / "state")
        expected = trainer.lr, trainer.scheduler.num_bad_epochs, rates(trainer)
    with Trainer(the_task) as trainer:
        trainer.load(tmp_path / "state")
        assert (trainer.lr, trainer.scheduler.num_bad_epochs, rates(trainer)) == expected
    assert min(expected[2]) < 0.1, "the schedule has done something"


def test_saving_again_takes_the_place_of_what_was_saved(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with Trainer(every_way.task()) as trainer:
        for _ in range(2):
            take_steps(trainer, 2)
            trainer.save(folder)
        assert read_manifest(folder).step == 4
        assert [path.name for path in tmp_path.iterdir()] == ["state"]
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years of work")
        with pytest.raises(CheckpointError, match="no checkpoint that may be replaced"):
            trainer.save(tmp_path / "mine")
        assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"
        with pytest.raises(CheckpointError, match="There is no whole checkpoint at"):
            trainer.load(tmp_path / "mine")
        assert trainer.steps == 4, "what cannot be read changes nothing"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda trainer, path: trainer.load_state_dict({"step": 3}), "lacks model, optimizer, losses, facts"),
        (lambda trainer, path: trainer.load(path / "absent"), "There is no saved model at"),
        (lambda trainer, path: trainer.save(path / "absent" / "state"), "it is not there, or no folder"),
    ],
)
def test_what_cannot_be_is_said(act: Callable[[Trainer, Path], Any], message: str, tmp_path: Path) -> None:
    with Trainer(every_way.task()) as trainer, pytest.raises(ShoalError, match=message):
        act(trainer, tmp_path)


def test_a_state_that_is_no_tensors_is_not_saved(tmp_path: Path) -> None:
    lbfgs = replace(every_way.task(), optimizer=lambda params: torch.optim.LBFGS(params), scheduler=None)
    with Trainer(lbfgs) as trainer:
        trainer.step((INPUTS, TARGETS))
        with pytest.raises(SpecError, match="LBFGS keeps lists of earlier steps"):
            trainer.save(tmp_path / "state")


def test_fit_after_the_last_step_says_what_to_do(tmp_path: Path) -> None:
    with Trainer(every_way.task(steps=2)) as trainer:
        trainer.fit()
        trainer.save(tmp_path / "state")
        trainer.load(tmp_path / "state")
        with pytest.raises(SpecError, match="The checkpoint is of step 2, and the run has 2 steps"):
            trainer.fit()
