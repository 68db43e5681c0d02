"""Slots of one process that meet in the middle of their passes."""

from __future__ import annotations

import threading

import pytest
import torch

import shoal
from shoal.errors import TaskError
from shoal.model.gathering import asking_nobody
from shoal.step.passes import LocalSwap, SlotPasses

SIZES = (3, 1, 2)
ROWS = torch.randn(sum(SIZES), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
STARTS = (0, 3, 4)


def parts() -> list[torch.Tensor]:
    return [part.clone().requires_grad_() for part in ROWS.split(SIZES)]


def compared(own: torch.Tensor, everybody: torch.Tensor) -> torch.Tensor:
    """A loss that needs all rows for each."""
    return (own @ everybody.T).logsumexp(1).sum()


@pytest.fixture
def passes() -> SlotPasses:
    return SlotPasses(LocalSwap(len(SIZES)))


def test_rows_come_in_slot_order_and_gradients_go_back(passes: SlotPasses) -> None:
    own, whole = parts(), ROWS.clone().requires_grad_()
    compared(whole, whole.tanh()).backward()

    def act(slot: int) -> tuple[torch.Tensor, slice]:
        rows, where = shoal.gather(own[slot].tanh(), with_own=True)
        compared(own[slot], rows).backward()
        return rows.detach(), where

    for _ in range(2):  # the second time they run together from the beginning
        for part in own:
            part.grad = None
        for (rows, where), start, part in zip(passes.run(1, range(3), act), STARTS, own, strict=True):
            assert torch.equal(rows, ROWS.tanh())
            assert where == slice(start, start + len(part))
        torch.testing.assert_close(torch.cat([part.grad for part in own]), whole.grad)


def test_each_slot_has_its_own_random_numbers(passes: SlotPasses) -> None:
    def act(slot: int) -> list[float]:
        torch.manual_seed(slot)
        found = []
        for _ in range(3):
            found.append(float(torch.rand(())))
            shoal.gather(torch.zeros(1))
        return found

    def alone(slot: int) -> list[float]:
        torch.manual_seed(slot)
        return [float(torch.rand(())) for _ in range(3)]

    assert passes.run(1, range(3), act) == [alone(slot) for slot in range(3)]


def test_what_a_slot_has_of_the_process_is_put_back() -> None:
    now = ["nobody"]

    def keep() -> object:
        name = now[0]
        return lambda: now.__setitem__(0, name)

    def act(slot: int) -> list[str]:
        now[0], seen = f"slot {slot}", []
        for _ in range(2):
            shoal.gather(torch.zeros(1))
            seen.append(now[0])
        return seen

    passes = SlotPasses(LocalSwap(2), [keep])
    assert passes.run(1, range(2), act) == [["slot 0"] * 2, ["slot 1"] * 2]


def test_who_never_meets_needs_no_threads(passes: SlotPasses) -> None:
    seen = passes.run(1, range(3), lambda slot: (slot, threading.current_thread() is threading.main_thread()))
    assert seen == [(0, True), (1, True), (2, True)]


def test_a_tensor_that_is_changed_afterwards_was_brought_as_it_was(passes: SlotPasses) -> None:
    def act(slot: int) -> list[float]:
        x = torch.full((1,), float(slot))
        rows = shoal.gather(x)
        x.fill_(99.0)
        return rows.tolist()

    assert passes.run(1, range(3), act) == [[0.0, 1.0, 2.0]] * 3


@pytest.mark.parametrize("lazy", [0, 1, 2])
def test_slots_that_meet_unequally_often(passes: SlotPasses, lazy: int) -> None:
    def act(slot: int) -> None:
        for _ in range(1 + (slot != lazy)):
            shoal.gather(torch.zeros(1))

    with pytest.raises(TaskError, match=rf"equally often .* at step 7 slot \d came for rows when slot {lazy} had"):
        passes.run(7, range(3), act)
    assert not any(thread.name.startswith("slot-") for thread in threading.enumerate())


def test_one_that_goes_back_while_another_goes_on(passes: SlotPasses) -> None:
    def act(slot: int) -> None:
        rows = shoal.gather(torch.zeros(1, requires_grad=True))
        if slot:
            shoal.gather(rows)
        rows.sum().backward()

    with pytest.raises(TaskError, match="slot 0 came for gradients when slot 1 came for its rows"):
        passes.run(1, range(3), act)


def test_an_error_of_one_slot_ends_all(passes: SlotPasses) -> None:
    ended = []

    def act(slot: int) -> None:
        try:
            shoal.gather(torch.zeros(1))
            if slot == 1:
                raise ZeroDivisionError("slot 1")
            shoal.gather(torch.zeros(1))
        finally:
            ended.append(slot)

    with pytest.raises(ZeroDivisionError, match="slot 1"):
        passes.run(1, range(3), act)
    assert sorted(ended[-3:]) == [0, 1, 2]
    assert not any(thread.name.startswith("slot-") for thread in threading.enumerate())


def test_rows_must_look_alike(passes: SlotPasses) -> None:
    with pytest.raises(TaskError, match=r"slot 0 brought float32 of shape \(1, 1\) and slot 1 .* \(1, 2\)"):
        passes.run(1, range(3), lambda slot: shoal.gather(torch.zeros(1, slot + 1)))


def test_outside_of_a_step_a_batch_is_all_there_is() -> None:
    x = torch.ones(2, 3)
    assert shoal.gather(x) is x
    assert shoal.gather(x, with_own=True) == (x, slice(0, 2))
    with asking_nobody() as nobody:
        assert torch.equal(shoal.gather(x), x)
    assert nobody.was_asked


@pytest.mark.parametrize(("given", "found"), [(torch.tensor(1.0), "a single number"), ([1.0], "list")])
def test_what_has_no_rows(given: object, found: str) -> None:
    with pytest.raises(TaskError, match=f"a row for each sample, found {found}"):
        shoal.gather(given)  # type: ignore[call-overload]


def test_no_second_derivative(passes: SlotPasses) -> None:
    def act(slot: int) -> None:
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(shoal.gather(x).square().sum(), x, create_graph=True)

    with pytest.raises(TaskError, match="has no second derivative"):
        passes.run(1, range(3), act)


def test_time_passes_for_the_slot_that_computes(passes: SlotPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("shoal.step.passes.time.perf_counter", lambda: now[0])

    def act(slot: int) -> float:
        begun = passes.clock()
        now[0] += 1.0 + slot
        shoal.gather(torch.zeros(1))
        now[0] += 10.0
        return passes.clock() - begun

    assert passes.run(1, range(3), act) == [11.0, 12.0, 13.0]


def test_who_never_met_is_refused_later(passes: SlotPasses) -> None:
    passes.run(1, range(len(SIZES)), lambda slot: None)
    assert passes.never_meet
    with pytest.raises(TaskError, match="after step 1 had gone by without it"):
        shoal.gather(torch.ones(2, 3))
    with torch.no_grad():
        assert torch.equal(shoal.gather(torch.ones(2, 3)), torch.ones(2, 3)), "an evaluation has its batch alone"


def test_who_met_meets_again(passes: SlotPasses) -> None:
    own = parts()
    passes.run(1, range(len(SIZES)), lambda slot: shoal.gather(own[slot]))
    assert not passes.never_meet
