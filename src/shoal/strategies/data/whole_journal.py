"""What lets another process go on with an optimizer that works on the whole model, wherever worker 0 was killed.

In the segment lie the parameters as they were before the update under way, and two images of the optimizer's
state: one of the last update, and room for that of the next. One word says how many updates there were, and by an
odd number that one is under way. It is stored after all that it speaks of, so a death at any moment leaves all of
an update or nothing of it; gradients stay until it is committed, so whoever takes over makes the same once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shoal.errors import PeerLost
from shoal.model.optimizer.kinds import state_schema, tried_on_copies
from shoal.model.optimizer.state import load_named_state
from shoal.model.optimizer.whole_state import MovedSettings, StateImage
from shoal.model.replica import Replica
from shoal.strategies.data.shared import SharedState

_LOST = -1
"""The word's value where nothing is kept: the state goes with its process."""
_MOST_TRIALS = 16


def image_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Room for an image of an optimizer's state, learnt from steps on copies of the parameters; 0 for none."""
    if state_schema(optimizer) is not None:
        return 0  # It is kept element by element.
    if isinstance(optimizer, torch.optim.LBFGS):
        return 0  # Its update computes gradients again, over those that a successor would need.
    if (twin := tried_on_copies(optimizer)) is None:
        return 0
    nbytes = 0
    for _ in range(_MOST_TRIALS):  # Some keep a list of their last steps: until it grows no more.
        before, nbytes = nbytes, StateImage.nbytes_for(twin)
        if nbytes == before:
            break
        twin.step()
    return nbytes


class WholeJournal:
    """Worker 0's, or that of whoever has its place."""

    def __init__(self, shared: SharedState, replica: Replica) -> None:
        self._shared = shared
        self._optimizer = replica.optimizer
        self._mark = shared.marks.progress[0]
        self._params = shared.segment.tensor("params", torch.uint8)
        self._old = shared.segment.tensor("old-params", torch.uint8)
        self._images = [StateImage(shared.segment.tensor(f"image/{number}", torch.uint8)) for number in range(2)]
        self.step = 0
        """The last step whose update is complete, where it is known."""
        self._moved = MovedSettings(self._optimizer)
        if self._word == _LOST:
            raise PeerLost(
                f"Worker 0 died, and with it the state of {type(replica.optimizer).__name__}, which only it held; "
                "start again, or use an optimizer that works element by element, such as AdamW."
            )
        if self._word < 2:
            load_named_state(replica)
        else:
            self.step, moved = self._images[self._word // 2 % 2].read(self._optimizer)
            self._moved.adopt(moved)

    @property
    def is_kept(self) -> bool:
        """Whether anything is."""
        return self._old.numel() > 0 and self._word != _LOST

    @contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """The optimizer makes the update of this step: all of it is kept, or what was there before."""
        self._begin()
        with self._moved.watching():
            yield
        self._commit(step)

    def _begin(self) -> None:
        """Put back what an update that was not finished has changed, or keep what there is."""
        if not self.is_kept:
            self._word = _LOST
        elif self._word % 2:
            self._params.copy_(self._old)
            self._shared.setting.company.report(
                "A model that its worker left half updated was put back and is updated again."
            )
        else:
            self._old.copy_(self._params)
            self._word += 1

    def _commit(self, step: int) -> None:
        if not self.is_kept:
            return
        updates = self._word // 2 + 1
        if self._images[updates % 2].write(self._optimizer, step, self._moved.plain()):
            self._word = 2 * updates
            self.step = step
        else:
            self._word = _LOST

    @property
    def _word(self) -> int:
        return self._shared.counters[self._mark]

    @_word.setter
    def _word(self, value: int) -> None:
        self._shared.counters[self._mark] = value
