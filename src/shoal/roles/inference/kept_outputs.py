"""What metrics over a whole data set read of every batch, kept in files until all batches are computed.

A file holds what one metric reads of one lane's batches, in their order, and has its name once it is whole: who
takes over a killed worker's lane finds it, or makes it again. So memory holds one batch at a time, unless the
metric itself wants all of them at once.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch

from shoal.errors import TaskError
from shoal.observe.disk import writing
from shoal.spec import World


class KeptOutputs:
    """Those of one evaluation, in a folder that its workers can enter and no other user."""

    def __init__(self, world: World, name: str) -> None:
        """`name`: the same at all workers that evaluate together, and of no other evaluation."""
        assert world.sockets or world.world_size == 1, "workers have a folder in common"
        given, own = world.sockets, f"shoal-{os.getpid()}-{name}"
        self._folder = Path(given) / name if given else Path(tempfile.gettempdir()) / own

    @contextmanager
    def of_lane(self, lane: int, num_metrics: int) -> Iterator[list[LaneFile]]:
        """A file for each metric, to append a lane's batches to; others find them when all are written."""
        with ExitStack() as opened:
            yield [opened.enter_context(LaneFile(self._path(metric, lane))) for metric in range(num_metrics)]

    def read(self, metric: int, batches: Iterable[int], lanes: int) -> Iterator[list[torch.Tensor]]:
        """What a metric reads of these batches, which rise and went round the lanes."""
        with ExitStack() as opened:
            files: dict[int, IO[bytes]] = {}
            for number in batches:
                lane = number % lanes
                if lane not in files:
                    files[lane] = opened.enter_context(self._path(metric, lane).open("rb"))
                yield [torch.from_numpy(np.load(files[lane], allow_pickle=False)) for _ in range(2)]

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self._folder

    def lacks(self, lane: int, num_metrics: int) -> bool:
        """Whether what was kept of a lane is not here."""
        return not all(self._path(metric, lane).exists() for metric in range(num_metrics))

    def remove(self) -> None:
        """Nobody reads them any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, metric: int, lane: int) -> Path:
        return self._folder / f"{metric}-{lane}"


class LaneFile:
    """A file that comes to be when something is appended, and has its name when it is closed without an error.

    Of the processes of a lane several may have an output: each writes the same, and the last name counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def append(self, kept: Sequence[torch.Tensor]) -> None:
        """What a metric reads of the next batch."""
        arrays = [_array(tensor) for tensor in kept]
        with writing(self._path.parent):
            if self._file is None:
                self._path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
                # It is renamed when it is whole, and goes with its folder where it never is.
                self._file = tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False)  # noqa: SIM115
            for array in arrays:
                np.save(self._file, array, allow_pickle=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None:
            return
        with writing(self._path.parent):
            self._file.close()
            if kind is None:
                os.replace(self._file.name, self._path)


def require_tensors(output: Any, target: Any) -> None:
    """Only tensors can be put together over all batches."""
    for what, value in (("the model returned", output), ("the target is", target)):
        if not isinstance(value, torch.Tensor):
            raise TaskError(
                f"Task: a metric over a whole data set needs one tensor of outputs and one of targets, but {what} "
                f"{type(value).__name__}; let the model return its main output alone when not training, or use "
                "means over batches."
            )


def _array(tensor: torch.Tensor) -> np.ndarray:
    value = tensor.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
