"""The passes of a process's slots, which may meet in the middle.

Slots of one process are coroutines: each has a thread, and one of them runs at a time, until it has something for
the others. When all have come so far, what they brought is swapped with the slots of other processes, and they go
on in slot order. So each computes as if it were alone in a process, with the same bits wherever it is.

Passes that never meet need no threads, and nobody knows beforehand: slots run one after the other, until one of
them asks for the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from shoal.errors import SpecError, TaskError
from shoal.model.gathering import Asking, Gathered, Question, asked_by, refuse_from_now_on

T = TypeVar("T")

Keep = Callable[[], Callable[[], None]]
"""Notes what a slot has of the process's state, in the middle of its passes; what it returns puts that back."""


class Brought(NamedTuple):
    """What a slot has for the others."""

    question: Question
    values: torch.Tensor


class Swap(Protocol):
    """Carries what slots bring from process to process."""

    def begin(self, step: int, slots: Sequence[int]) -> None:
        """These slots of this process begin the passes of a step, perhaps not for the first time. No slot begins
        before all have ended those of the step before."""

    def swap(self, brought: Mapping[int, Brought]) -> Sequence[Brought | None]:
        """By slot, of all: what each has brought; None where one has ended its passes."""

    def left(self, slot: int) -> None:
        """A slot has ended its passes."""

    def end(self) -> Mapping[int, Brought]:
        """All of this process's slots have; what others still bring, as far as that is known."""


class LocalSwap:
    """All slots are in this process."""

    def __init__(self, slots: int) -> None:
        self._slots = range(slots)

    def begin(self, step: int, slots: Sequence[int]) -> None:
        """Nobody else has to know."""

    def swap(self, brought: Mapping[int, Brought]) -> Sequence[Brought | None]:
        return [brought.get(slot) for slot in self._slots]

    def left(self, slot: int) -> None:
        """Nobody else has to know."""

    def end(self) -> Mapping[int, Brought]:
        return {}


class _Together(BaseException):
    """A slot asks for the others while they run one after the other. Not for the task's code to catch."""


class _GivenUp(BaseException):
    """Another slot has failed, or the process must look elsewhere. Not for the task's code to catch."""


class SlotPasses:
    """Runs the passes of a process's slots; `gather` and BatchNorm layers with its `asking` meet here."""

    def __init__(self, swap: Swap, keeps: Sequence[Keep] = (), *, device: str = "cpu") -> None:
        """`keeps`: what of the process's state each slot has to itself, besides random numbers."""
        self.asking = Asking(self._bring)
        self._swap = self._now_by = swap
        self._keeps: tuple[Keep, ...] = (_keep_random_numbers, self.asking.keep, *keeps)
        self._device = device
        self._meets = False
        """Whether slots have met before: then they run together at once."""
        self._was_asked = False
        self.never_meet = False
        """Whether a step has gone by in which none asked for the others: then none does, and they can run without
        this."""
        self._step = 0
        self._slot: int | None = None
        """The one that runs now."""
        self._waited_s = 0.0
        """How long it has waited for others, where it is alone."""
        self._is_alone = False
        self._together: Mapping[int, _Coroutine[Any]] = {}

    def run(
        self, step: int, slots: Sequence[int], act: Callable[[int], T], *, swap: Swap | None = None
    ) -> list[T]:
        """`act` for each slot, with what is asked in it answered by all slots; `swap`: otherwise than usual."""
        if not slots:
            return []
        self._step, self._now_by = step, swap or self._swap
        with asked_by(self.asking):
            try:
                found = self._run(slots, act)
            finally:
                self._slot, self._together = None, {}
        if more := self._now_by.end():
            self._check({**dict.fromkeys(slots), **more})
        if not self._was_asked and swap is None:
            self.never_meet = True
            refuse_from_now_on(lambda: _too_late(step))
        return found

    def clock(self) -> float:
        """Seconds that pass only while the slot that asks computes."""
        own = None if self._slot is None else self._together.get(self._slot)
        return time.perf_counter() - (self._waited_s if own is None else own.waited_s)

    def _run(self, slots: Sequence[int], act: Callable[[int], T]) -> list[T]:
        found: list[T] = []
        self._is_alone = len(slots) == 1
        if self._is_alone or not self._meets:
            self._now_by.begin(self._step, slots)
            try:
                for slot in slots:
                    self._slot, self._waited_s = slot, 0.0
                    found.append(act(slot))
                    self._now_by.left(slot)
                return found
            except _Together:
                self._meets = True
        if self._device != "cpu":
            raise SpecError(
                f"Slots that meet in a pass need a process each on a GPU, but one has {len(slots)} and "
                f"device={self._device}; leave slots out."
            )
        rest = slots[len(found) :]
        self._now_by.begin(self._step, rest)
        return found + self._run_together(rest, act)

    def _run_together(self, slots: Sequence[int], act: Callable[[int], T]) -> list[T]:
        """All slots up to where they meet, one after the other, and again from there."""
        passes = {slot: _Coroutine(slot, act) for slot in slots}
        self._together = passes
        kept = dict.fromkeys(slots, self._keep())
        answers: dict[int, Gathered] = {}
        try:
            while waiting := [each for each in passes.values() if not each.has_ended]:
                for each in waiting:
                    kept[each.slot]()
                    self._slot = each.slot
                    each.go_on(answers.get(each.slot))
                    if each.has_ended:
                        self._now_by.left(each.slot)
                    else:
                        kept[each.slot] = self._keep()
                brought = {each.slot: each.brought for each in waiting if each.brought is not None}
                if brought:
                    parts = self._meet(brought)
                    answers = {slot: Gathered(parts, slot) for slot in brought}
        finally:
            for each in passes.values():
                each.give_up()
        return [each.result for each in passes.values()]

    def _keep(self) -> Callable[[], None]:
        put_back = [keep() for keep in self._keeps]

        def restore() -> None:
            for each in put_back:
                each()

        return restore

    def _bring(self, values: torch.Tensor, question: Question) -> Gathered:
        slot = self._slot
        if slot is None:
            return Gathered((values,), 0)  # a trial, which belongs to no step
        self._was_asked = True
        # A copy: the task's code may change its own while others still read this one.
        brought = Brought(question, values.clone(memory_format=torch.contiguous_format))
        if slot in self._together:
            return self._together[slot].meet(brought)
        if not self._is_alone:
            raise _Together
        begun = time.perf_counter()
        parts = self._meet({slot: brought})
        self._waited_s += time.perf_counter() - begun
        return Gathered(parts, slot)

    def _meet(self, brought: Mapping[int, Brought]) -> list[torch.Tensor]:
        found = self._now_by.swap(brought)
        self._check(dict(enumerate(found)))
        return [each.values for each in found if each is not None]

    def _check(self, found: Mapping[int, Brought | None]) -> None:
        """All slots have come for the same."""
        asking, question = next((slot, each.question) for slot, each in found.items() if each is not None)
        for slot, each in found.items():
            if each is None or each.question is not question:
                did = "had ended its passes" if each is None else f"came for its {each.question.name.lower()}"
                raise TaskError(
                    "Slots must call shoal.gather, and pass layers of batchnorm=sync, equally often and in one "
                    f"order, but at step {self._step} slot {asking} came for {question.name.lower()} when slot "
                    f"{slot} {did}; do it whatever is in a batch, and let every slot have samples that count."
                )


class _Coroutine(Generic[T]):
    """A slot's passes in a thread that runs only while whoever made it waits."""

    def __init__(self, slot: int, act: Callable[[int], T]) -> None:
        self.slot = slot
        self.has_ended = False
        self.brought: Brought | None = None
        """What it waits with."""
        self.waited_s = 0.0
        self._act = act
        self._answer: Gathered | None = None
        self._is_given_up = False
        self._error: BaseException | None = None
        self._its_go, self._our_go = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, name=f"slot-{slot}", daemon=True)

    def go_on(self, answer: Gathered | None) -> None:
        """Let it run until it meets others, or ends; what it raises is raised."""
        self.brought, self._answer = None, answer
        if not self._thread.is_alive():
            self._thread.start()
        self._its_go.release()
        self._our_go.acquire()
        if self._error is not None:
            raise self._error

    def meet(self, brought: Brought) -> Gathered:
        """In its thread: wait until the others have come so far."""
        begun, self.brought = time.perf_counter(), brought
        self._our_go.release()
        self._its_go.acquire()
        if self._is_given_up:
            raise _GivenUp
        self.waited_s += time.perf_counter() - begun
        assert self._answer is not None
        return self._answer

    def give_up(self) -> None:
        """End its thread, wherever that is."""
        self._is_given_up = True
        if self._thread.is_alive():
            self._its_go.release()
            self._thread.join()

    def _live(self) -> None:
        self._its_go.acquire()
        try:
            self.result = self._act(self.slot)
        except BaseException as error:
            self._error = error
        self.has_ended = True
        self._our_go.release()


def _too_late(step: int) -> TaskError:
    return TaskError(
        f"Task: shoal.gather was called for the first time after step {step} had gone by without it; call it in "
        "every step, whatever is in a batch."
    )


def _keep_random_numbers() -> Callable[[], None]:
    state = torch.default_generator.get_state()

    def put_back() -> None:
        torch.default_generator.set_state(state)

    return put_back
