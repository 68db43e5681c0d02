"""What all lossy compressions share: error feedback, and raw sending where packing would not pay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import ClassVar

import torch

from shoal.comm.codec import Frame
from shoal.comm.compression.base import Compression, Packed, take_frames, take_tensor
from shoal.errors import SpecError, TaskError

_RESIDUAL = "residual/"


def named_under(prefix: str, state: Mapping[str, torch.Tensor]) -> dict[Hashable, torch.Tensor]:
    """Copies of the tensors whose names begin so, by what follows."""
    return {name.removeprefix(prefix): one.clone() for name, one in state.items() if name.startswith(prefix)}


class Lossy(Compression):
    """A compression that remembers, per tensor, what it did not send, and adds it to the next call's values.

    So nothing is lost, only late: the decoded tensors add up to the encoded ones less one residual.
    """

    lossy: ClassVar[bool] = True
    num_frames: ClassVar[int]
    """Frames of a packed tensor."""

    def __init__(self, text: str, *, error_feedback: bool = True) -> None:
        super().__init__(text)
        self._error_feedback = error_feedback
        self._residuals: dict[Hashable, torch.Tensor] = {}

    def forget(self, key: Hashable) -> None:
        self._residuals.pop(key, None)

    def remembered(self) -> dict[str, torch.Tensor]:
        return {f"{_RESIDUAL}{key}": residual.cpu() for key, residual in self._residuals.items()}

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:
        self._residuals = named_under(_RESIDUAL, state)

    def residual(self, key: Hashable) -> torch.Tensor | None:
        """What was pushed under this key and has not been sent; None before the first push, or if all was."""
        return self._residuals.get(key)

    @abstractmethod
    def packed_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """What a tensor of this shape and type takes on the wire when packed."""

    @abstractmethod
    def _pack(self, key: Hashable, values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The frames, in memory of their own, where the values are. `values` are within the limit, float32 or
        float64, and not to be changed; `dtype` is the tensor's own type."""

    @abstractmethod
    def _check(self, frames: tuple[Frame, ...], shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """The frames, if they are what `_pack` makes of such a tensor; they are in the host's memory yet."""

    @abstractmethod
    def _unpack(self, frames: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write the values that checked frames carry, which are where `out` is."""

    def limit(self, shape: torch.Size, dtype: torch.dtype) -> float:
        """The largest absolute value that packing carries; beyond it values saturate, and the rest comes later."""
        return torch.finfo(dtype).max

    def pays(self, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether packing makes such a tensor smaller. Both sides know, so the wire need not say."""
        return self.packed_bytes(shape, dtype) < shape.numel() * dtype.itemsize

    def _encode(self, key: Hashable, values: torch.Tensor) -> Packed:
        if not self.pays(values.shape, values.dtype):
            return Packed({}, (values.to("cpu", copy=True),))
        total = self._with_residual(key, values)
        limit = self.limit(values.shape, values.dtype)
        within = total if self._peak(key, total) <= limit else total.clamp(-limit, limit)
        frames = self._pack(key, within, values.dtype)
        if self._error_feedback:
            received = torch.empty_like(values)
            self._unpack(frames, received)
            self._residuals[key] = total.sub_(received)
        return Packed({}, tuple(frame.cpu() for frame in frames))

    def _decode(self, packed: Packed, out: torch.Tensor) -> None:
        if not self.pays(out.shape, out.dtype):
            (raw,) = take_frames(packed, 1)
            out.copy_(take_tensor(raw, out.dtype, out.shape))
            return
        frames = take_frames(packed, self.num_frames)
        checked = self._check(frames, out.shape, out.dtype)
        self._unpack(tuple(frame.to(out.device) for frame in checked), out)

    def _with_residual(self, key: Hashable, values: torch.Tensor) -> torch.Tensor:
        wide = values.to(working_type(values.dtype))
        residual = self._residuals.get(key)
        if residual is None:
            return wide.clone() if wide is values else wide
        if residual.shape != wide.shape or residual.dtype != wide.dtype:
            raise SpecError(
                f"compress={self.text}: tensor {key!r} was {residual.dtype} {list(residual.shape)} before and is "
                f"{wide.dtype} {list(wide.shape)} now; call forget() when a tensor changes its shape."
            )
        return wide + residual.to(wide.device)  # one that was loaded is in the host's memory

    def _peak(self, key: Hashable, values: torch.Tensor) -> float:
        low, high = torch.aminmax(values)
        peak = torch.maximum(high, -low)
        if not torch.isfinite(peak):
            raise TaskError(
                f"compress={self.text}: tensor {key!r} and what earlier calls left of it add up to values "
                "that are not finite; lower the learning rate, clip gradients, or use compress=none to see which."
            )
        return float(peak)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Sums and residuals of 16-bit tensors are kept in float32."""
    return torch.promote_types(dtype, torch.float32)
