"""How a batch is cut for GPUs and processors that take one step together, and whether these pay. No torch."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_GAIN = 1.03
"""What is not faster by so much may not be faster at all."""


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """Seconds, measured on the job's own model."""

    gpus: int
    """How many there are for workers."""
    whole_s: float
    """A step of one GPU with the whole batch."""
    half_s: float
    """With half of it."""
    sample_s: float
    """What a sample takes a worker on the processor."""
    sum_s: float
    """What it takes at least to bring gradients together in the host's memory, and back."""

    def gpu_s(self, samples: float, batch: int) -> float:
        """A step of one GPU with so many samples: a part that does not depend on them, and one that does."""
        slope = max(0.0, 2 * (self.whole_s - self.half_s) / batch)
        return max(0.0, self.whole_s - slope * (batch - samples))


@dataclass(frozen=True, kw_only=True)
class DeviceShares:
    """What was found."""

    sizes: tuple[int, ...]
    """By worker, GPUs first: samples of the whole batch."""
    together_s: float
    """What a step is expected to take with these, at best."""
    alone_s: float
    """What it takes the GPUs alone."""
    share: float
    """How many times as much as a GPU a worker on the processor computes in a second."""

    @property
    def pays(self) -> bool:
        """Whether all together are expected to be faster than the GPUs alone."""
        return self.alone_s >= LEAST_GAIN * self.together_s

    @property
    def text(self) -> str:
        """One line that says so."""
        gain, beside = self.alone_s / self.together_s, f"a processor's worker computes {self.share:.2g} of a GPU's"
        if self.pays:
            return f"cuda+cpu: {beside}; parts of {'+'.join(map(str, self.sizes))} samples, up to {gain:.2f} times"
        return (
            f"cuda+cpu: the processor does not pay, and is left out: {beside}, and with it a step would take "
            f"{self.together_s * 1e3:.3g} ms or more, not {self.alone_s * 1e3:.3g} ({gain:.2g} of the speed)"
        )


def cut_by_devices(batch: int, workers: int, times: DeviceTimes) -> DeviceShares:
    """The cut with which all are done the earliest. There are more workers than GPUs, and samples for all."""
    gpus, others = times.gpus, workers - times.gpus
    found: tuple[float, int] | None = None
    for part in range(1, (batch - gpus) // others + 1):
        slowest = max(times.gpu_s((batch - others * part) / gpus, batch), part * times.sample_s)
        found = min(found or (slowest, part), (slowest, part))
    assert found is not None, "every worker gets a sample"
    slowest, part = found
    rest = batch - others * part
    sizes = [rest * (gpu + 1) // gpus - rest * gpu // gpus for gpu in range(gpus)]
    return DeviceShares(
        sizes=(*sizes, *(part,) * others),
        together_s=slowest + times.sum_s,
        alone_s=times.gpu_s(batch / gpus, batch),
        share=times.whole_s / (batch * times.sample_s),
    )
