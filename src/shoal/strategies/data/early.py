"""Chunks of gradients that leave while backward passes go on to the layers before."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shoal.arena import Grid
from shoal.errors import TaskError
from shoal.strategies.data.update import ChunkUpdate

_STAYS = 0
_LOOKS_UP_S = 0.002
"""How often what has arrived is looked for: some models have hundreds of parameters, and pass them in no time."""


class EarlyChunks:
    """One worker's part in it.

    It notes, where all workers of its host can read it, of which chunks its passes have made the gradients, and
    lets those that it owns go once all slots of the host have. The model's first chunk, the last to be made,
    stays. So its total shows that all hosts know all about the step: whoever has all totals may take it, and the
    others can be told to (`accord.py`). Chunks stay, too, where gradients come in parts, as those of checkpointed
    layers that are used twice: the first pass, in which nothing leaves, shows which these are.
    """

    def __init__(
        self,
        grid: Grid,
        table: np.ndarray,
        slots: Sequence[int],
        owned: Mapping[int, ChunkUpdate],
        leave: Callable[[int, ChunkUpdate], bool],
        look_up: Callable[[], None],
    ) -> None:
        """`table`: in the host's memory, by slot and chunk the step whose gradients were made; in a row below that
        in which the chunk has left; in the row of another host's first slot, in which it has left there. `slots`:
        this host's. `leave`: False where a chunk cannot, yet."""
        self._table, self._slots, self._owned = table, list(slots), owned
        self._leave, self._look_up = leave, look_up
        self._of_param: defaultdict[int, list[int]] = defaultdict(list)
        self._sizes: Counter[int] = Counter()
        """By chunk: of how many parameters it has a part."""
        for number, chunk in enumerate(grid.chunks):
            for param in {piece.param for piece in chunk.pieces}:
                self._of_param[param].append(number)
                self._sizes[number] += 1
        self._awaited: Counter[int] = Counter()
        """By chunk: how many parameters have no gradient yet."""
        self._came: set[int] = set()
        """Parameters that have one."""
        self._in_parts: set[int] = set()
        """Parameters of which, in some pass, more came after the first."""
        self._may_leave = False
        self._waiting: list[int] = []
        """Chunks of this worker that have not left, the last of the model first, as passes make them."""
        self._step = self._slot = 0
        self._looked_up_at = 0.0

    def begin(self, step: int, slot: int, *, may_leave: bool) -> None:
        """A slot's backward pass is to come; `may_leave`: another has shown how gradients come."""
        if step != self._step:
            self._step, self._waiting = step, sorted(self._owned.keys() - {_STAYS}, reverse=True)
        self._slot, self._may_leave = slot, may_leave
        self._came.clear()
        self._awaited = self._sizes.copy()
        for param in self._in_parts:
            self._awaited.update(self._of_param[param])  # one that never comes

    def on_taken(self, param: int) -> None:
        """A parameter has its gradient, or more of it."""
        if param in self._came:
            self._more_has_come(param)
            return
        self._came.add(param)
        if not self._may_leave:
            return
        for number in self._of_param[param]:
            self._awaited[number] -= 1
            if not self._awaited[number]:
                self._table[self._slot, number] = self._step
        if self._waiting:
            self._let_leave()

    def _more_has_come(self, param: int) -> None:
        if any((self._table[self._slot, self._of_param[param]] == self._step).tolist()):
            raise TaskError(
                "Task: in this step, for the first time, a parameter's gradient came in parts, as do those of "
                "checkpointed layers used twice; one had left for other hosts. Use strategy=data:via=ring."
            )
        self._in_parts.add(param)

    def _let_leave(self) -> None:
        if (now := time.monotonic()) - self._looked_up_at > _LOOKS_UP_S:
            self._looked_up_at = now
            self._look_up()
        made = (self._table[self._slots][:, self._waiting] == self._step).all(0)
        for number in [one for one, is_made in zip(self._waiting, made, strict=True) if is_made]:
            if self._leave(number, self._owned[number]):
                self._table[-1, number] = self._step
                self._waiting.remove(number)

    def left(self, step: int) -> np.ndarray:
        """By chunk: whether it has left this host in this step, once all of its slots have ended their passes."""
        found: np.ndarray = self._table[-1] == step
        return found

    def note(self, step: int, slots: Sequence[int], left: np.ndarray) -> None:
        """Let all of this host know what has left the host with these slots."""
        self._table[slots[0]] = np.where(left, step, 0)

    def noted(self, step: int, slots: Sequence[int]) -> set[int]:
        """The chunks that have left the host with these slots."""
        return set(np.flatnonzero(self._table[slots[0]] == step).tolist()) if slots else set()

    def forget(self) -> None:
        """Of the step that is taken again nothing has been made."""
        self._table[:] = 0
