"""Data parallel whose gradients travel compressed between hosts; what was not sent yet goes into checkpoints."""

from __future__ import annotations

from dataclasses import replace

import torch

from shoal.checkpoint.model_stream import TensorStream
from shoal.model.replica import Replica
from shoal.step.work import Work
from shoal.strategies.base import Setting, StepResult
from shoal.strategies.data.collective import CollectiveData
from shoal.strategies.groups.kept_apart import KeptApart
from shoal.strategies.groups.opening import open_group
from shoal.strategies.groups.vector_sums import make_sums
from shoal.strategies.groups.vectors import ValueSpan

_WORD, _KIND = "unsent", "gradient"


class CompressedData(CollectiveData):
    """Inside a host gradients are added up as they are; the first worker of each sends that to the others."""

    def open(self, replica: Replica, setting: Setting) -> None:
        self._group = self._given = open_group("auto", setting)
        super().open(replica, setting)
        self._sums = make_sums(self._spec.between, self._group, setting)
        self._sums.load(KeptApart(_WORD, replica.start.aside).of(self._group.index, _KIND))
        starts = {flat.dtype: flat.storage_offset() for flat in self._flats}
        self._spans = [
            ValueSpan(
                name=name, kind=view.dtype, start=int(view.storage_offset() - starts[view.dtype]), shape=view.shape
            )
            for name, view in zip(replica.trained, self._views, strict=True)
        ]

    def _add_up(self, flats: list[torch.Tensor]) -> None:
        self._sums.all_reduce_({flat.dtype: flat for flat in flats}, self._spans)

    def take(self, work: Work) -> StepResult:
        result = super().take(work)
        if result.stop or work.step == self._setting.extent.total_steps:
            self._group.barrier()  # nobody leaves before all have what it sent
        return replace(result, facts={"wire": self._sums.facts()})

    def state_stream(self) -> TensorStream:
        unsent = {f"{self._group.index}/{_KIND}/{name}": one for name, one in self._sums.state().items()}
        return KeptApart(_WORD, unsent).stream(self.snapshot(), self._group)

    def close(self) -> None:
        super().close()
        self._group.close()
