"""What clients and server of a secure sum tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.errors import ProtocolError


@dataclass(frozen=True)
class PublicKeys:
    """From a client, for all."""

    sender: int
    sealing: bytes
    """With which others seal what is for this client."""
    masking: bytes
    """From which this client and another come to their mask."""


@dataclass(frozen=True)
class SealedShares:
    """From a client: what each other one is to keep of its secrets."""

    sender: int
    by_receiver: Mapping[int, bytes]


@dataclass(frozen=True)
class MaskedInput:
    """From a client: its vector, which its masks have made to look like chance."""

    sender: int
    vector: np.ndarray


@dataclass(frozen=True)
class UnmaskingShares:
    """From a client that is left, about others."""

    sender: int
    of_seeds: Mapping[int, int]
    """By client that stayed: a share of what its own mask follows from."""
    of_keys: Mapping[int, int]
    """By client that is gone: a share of what its masks with others follow from."""


def check_threshold(threshold: int, count: int) -> None:
    """More than half, lest two halves of the clients be asked for different secrets of one."""
    if not count // 2 < threshold <= count or threshold < 2:
        raise ProtocolError(
            f"A secure sum of {count} clients needs more than half of them, and at least 2, to the end; found a "
            f"threshold of {threshold}."
        )
