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
from shoal.errors import SpecError, unknown

__all__ = ["COMPRESSIONS", "Compression", "Packed", "make_compression"]

COMPRESSIONS = ("none", "bf16", "fp16", "int8", "topk", "randomk", "sign", "powersgd", "zstd")
"""The known names; `topk`, `randomk` and `powersgd` take an argument, `int8` may have one."""


def make_compression(text: str, *, error_feedback: bool = True) -> Compression:
    """The compression that the text names.

    `error_feedback=False` is for parameters and other values that are sent anew each time: what one sending
    rounded off has no place in the next.
    """
    name, colon, argument = text.partition(":")
    if name not in COMPRESSIONS:
        raise unknown("compress", name, COMPRESSIONS)
    if name == "topk":
        return TopK(text, _fraction(name, argument), error_feedback=error_feedback)
    if name == "randomk":
        return RandomK(text, _fraction(name, argument), error_feedback=error_feedback)
    if text == "int8:stochastic":
        return StochasticInt8(text, error_feedback=error_feedback)
    if name == "powersgd":
        return PowerSgd(text, _rank(argument), error_feedback=error_feedback)
    if colon:
        but = " but stochastic" if name == "int8" else ""
        raise SpecError(f"compress={name} takes no argument{but}, found {argument!r}; write compress={name}.")
    plain: dict[str, Callable[[], Compression]] = {
        "none": lambda: Raw(text),
        "zstd": lambda: Zstd(text),
        "sign": lambda: Sign(text, error_feedback=error_feedback),
        "int8": lambda: Int8(text, error_feedback=error_feedback),
        "bf16": lambda: Cast(text, torch.bfloat16, error_feedback=error_feedback),
        "fp16": lambda: Cast(text, torch.float16, error_feedback=error_feedback),
    }
    return plain[name]()


def _fraction(name: str, argument: str) -> float:
    try:
        fraction = float(argument)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise SpecError(
            f"compress={name} needs the fraction of elements to send, above 0 and up to 1, found {argument!r}; "
            f"write for instance {name}:0.01."
        )
    return fraction


def _rank(argument: str) -> int:
    if not (argument.isascii() and argument.isdigit() and int(argument)):
        raise SpecError(
            f"compress=powersgd needs a rank of at least 1, found {argument!r}; write for instance powersgd:4."
        )
    return int(argument)
