"""What a task takes for a callback."""

from __future__ import annotations

from typing import Any

import pytest

import shoal
from shoal.errors import SpecError
from shoal.spec.callback import Wish


def task(callbacks: Any) -> shoal.Task:
    return shoal.Task(
        model=lambda: None, optimizer=lambda params: None, loss=lambda out, y: 0, train=[1], callbacks=callbacks
    )


def test_objects_of_the_class_are_taken() -> None:
    mine = shoal.Callback()
    assert list(task([mine]).callbacks) == [mine] and not task(()).callbacks


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (shoal.Callback(), "found Callback; write callbacks=\\[…\\]"),
        ([shoal.Callback], "derive from shoal.Callback, found Callback; write"),
        ([print], "found builtin_function_or_method"),
    ],
)
def test_anything_else_is_refused(given: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        task(given)


def test_what_is_asked_for_waits_in_the_context() -> None:
    context = shoal.CallbackContext()
    context.stop()
    context.save()
    context.evaluate()
    context.log("a", 1.5)
    assert context.wishes == set(Wish) and context.logged == [("a", 1.5)]
