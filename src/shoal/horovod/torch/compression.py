"""How gradients are made smaller before they are reduced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """One way to do it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor as it is sent, and what is needed to undo that."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """As it was before."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors with 16 bits."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """In half precision."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """In the precision that it had."""
        assert isinstance(ctx, torch.dtype)
        return tensor.to(ctx)


class CompressionChoice:
    """What there is."""

    none = NoneCompressor
    fp16 = FP16Compressor


Compression = CompressionChoice
"""As Horovod calls it."""
