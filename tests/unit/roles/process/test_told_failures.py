"""What a failing process says of itself decides which exit status its run has."""

from __future__ import annotations

import pytest

from shoal.errors import CheckpointError, Diverged, LaunchError, PeerLost, SpecError, TaskError
from shoal.roles.process.failure import describe_failure
from shoal.spec import World


@pytest.mark.parametrize(
    ("error", "is_misuse"),
    [
        (SpecError("There is no such key."), True),
        (TaskError("The loss is a vector."), True),
        (Diverged("The loss is nan."), False),
        (LaunchError("The port is taken."), False),
        (CheckpointError("It is torn."), False),
        (PeerLost("Worker 1 is gone."), False),
        (KeyError("of the user's"), False),
        (MemoryError(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_asked_for_what_cannot_be(error: Exception, is_misuse: bool) -> None:
    assert describe_failure(error, World()).misuse is is_misuse
