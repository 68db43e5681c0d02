"""The contract of all compressions, and what they share: checks of what arrives, and counting of bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shoal.comm.codec import Frame
from shoal.errors import ProtocolError, SpecError


@dataclass(frozen=True)
class Packed:
    """A tensor as it travels: the parts of a message that carry it."""

    fields: dict[str, Any]
    """Small plain values."""
    frames: tuple[Frame, ...]
    """The bulk, in memory of its own, so that a repeated push sends the same bytes; `none` lends the tensor's."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(f.nbytes if isinstance(f, torch.Tensor) else memoryview(f).nbytes for f in self.frames)


class Compression(ABC):
    """Makes tensors smaller for the wire; both sides make theirs from the same text.

    An instance belongs to one thread. It encodes tensors of a floating type with one or two dimensions and never
    changes them; the receiver knows shape and type, and accepts nothing that does not fit them exactly. Tensors
    may be on a device, where they are then packed and unpacked: the host's memory has the frames alone.
    """

    lossy: ClassVar[bool]
    """Whether decoded values may differ from the encoded ones."""
    keeps_all_elements: ClassVar[bool] = True
    """Whether each element arrives every time, rounded at most. Without this a compression suits sums of
    gradients, where feedback brings the rest later, but not parameters."""

    cuts_matter: ClassVar[bool] = True
    """Whether what arrives depends on how tensors are cut; where not, neighbours in memory travel as one."""

    def __init__(self, text: str) -> None:
        self.text = text
        """How the user writes this compression."""
        self.raw_bytes = 0
        """Bytes of all tensors encoded so far."""
        self.wire_bytes = 0
        """Bytes of the frames made of them."""

    @property
    def ratio(self) -> float:
        """Bytes on the wire per byte encoded so far; 1.0 before the first."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 1.0

    @torch.no_grad()
    def encode(self, key: Hashable, values: torch.Tensor) -> Packed:
        """The tensor as it travels. `key` names it from one call to the next.

        A call counts as sent: keep the result until it is acknowledged, and repeat that, not the call.
        """
        _require_flat(self.text, values)
        packed = self._encode(key, values.contiguous())
        self.raw_bytes += values.nbytes
        self.wire_bytes += packed.num_bytes
        return packed

    @torch.no_grad()
    def decode(self, packed: Packed, out: torch.Tensor) -> None:
        """Write what was packed into `out`; `ProtocolError` and `out` untouched where it does not fit."""
        _require_flat(self.text, out)
        if not out.is_contiguous():
            raise SpecError(f"compress={self.text} decodes into contiguous tensors only; pass a contiguous one.")
        self._decode(packed, out)

    def forget(self, key: Hashable) -> None:  # noqa: B027 - nothing to do where nothing is remembered
        """Drop what is remembered about a tensor: it left, or it changed its shape."""

    def remembered(self) -> dict[str, torch.Tensor]:
        """What is remembered about tensors whose keys are texts, for whoever goes on with it later."""
        return {}

    def remember(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 - as above
        """Go on with what `remembered` gave."""

    @abstractmethod
    def _encode(self, key: Hashable, values: torch.Tensor) -> Packed: ...

    @abstractmethod
    def _decode(self, packed: Packed, out: torch.Tensor) -> None:
        """Check everything first, then write."""


def take_frames(packed: Packed, num_frames: int, field_names: frozenset[str] = frozenset()) -> tuple[Frame, ...]:
    """The frames, if they and the fields are as many as expected."""
    if len(packed.frames) != num_frames:
        raise ProtocolError(f"A packed tensor should have {num_frames} frames, found {len(packed.frames)}.")
    if packed.fields.keys() != field_names:
        raise ProtocolError(
            f"A packed tensor should have the fields {sorted(field_names)}, found {len(packed.fields)} others."
        )
    return packed.frames


def take_tensor(frame: Frame, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The frame, if it is a tensor of this type and shape."""
    if not isinstance(frame, torch.Tensor) or frame.dtype != dtype or frame.shape != shape:
        found = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, torch.Tensor) else "plain bytes"
        raise ProtocolError(f"A frame of a packed tensor should be {dtype} {list(shape)}, found {found}.")
    return frame


def _require_flat(text: str, tensor: torch.Tensor) -> None:
    if tensor.dim() not in (1, 2) or not tensor.is_floating_point():
        raise SpecError(
            f"compress={text} takes tensors of a floating type with 1 or 2 dimensions, found {tensor.dtype} "
            f"of shape {list(tensor.shape)}; flatten it, or send it without compression."
        )
