"""Compression of tensors for the wire: `none | bf16 | fp16 | int8 | int8:stochastic | topk:0.01 | randomk:0.01 |
sign | powersgd:4 | zstd`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.comm.compression.base import Compression, Packed
from shoal.comm.compression.cast import Cast
from shoal.comm.compression.int8 import Int8, StochasticInt8
from shoal.comm.compression.lossless import Raw, Zstd
from shoal.comm.compression.powersgd import PowerSgd
from shoal.comm.compression.randomk import RandomK
from shoal.comm.compression.sign import Sign
from shoal.comm.compression.topk import TopK
from shoal.spec.compressing import COMPRESSIONS, check_compression, fraction_of, rank_of

__all__ = ["COMPRESSIONS", "Compression", "Packed", "make_compression"]


def make_compression(text: str, *, error_feedback: bool = True) -> Compression:
    """The compression that the text names.

    `error_feedback=False` is for parameters and other values that are sent anew each time: what one sending
    rounded off has no place in the next.
    """
    check_compression(text)
    name, _, argument = text.partition(":")
    if name == "topk":
        return TopK(text, fraction_of(name, argument), error_feedback=error_feedback)
    if name == "randomk":
        return RandomK(text, fraction_of(name, argument), error_feedback=error_feedback)
    if name == "powersgd":
        return PowerSgd(text, rank_of(argument), error_feedback=error_feedback)
    if text == "int8:stochastic":
        return StochasticInt8(text, error_feedback=error_feedback)
    plain: dict[str, Callable[[], Compression]] = {
        "none": lambda: Raw(text),
        "zstd": lambda: Zstd(text),
        "sign": lambda: Sign(text, error_feedback=error_feedback),
        "int8": lambda: Int8(text, error_feedback=error_feedback),
        "bf16": lambda: Cast(text, torch.bfloat16, error_feedback=error_feedback),
        "fp16": lambda: Cast(text, torch.float16, error_feedback=error_feedback),
    }
    return plain[name]()
