"""Shamir's shares: a secret as the value at zero of a random polynomial, of which each client gets another value.

As many values as the polynomial has coefficients give it back; fewer tell nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from shoal.errors import ProtocolError

PRIME = 2**521 - 1
"""The field: a Mersenne prime above all secrets of 32 bytes."""
SHARE_BYTES = 66
SECRET_BYTES = 32


def cut(secret: bytes, receivers: Iterable[int], threshold: int) -> dict[int, int]:
    """A share for each receiver, of which `threshold` give the secret back."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {receiver: _value_at(coefficients, receiver + 1) for receiver in receivers}


def join(shares: Mapping[int, int], threshold: int) -> bytes:
    """The secret that these shares were cut from."""
    if len(shares) < threshold:
        raise ProtocolError(f"A secret needs {threshold} shares, found {len(shares)}.")
    points = [(receiver + 1, value) for receiver, value in sorted(shares.items())][:threshold]
    secret = 0
    for here, value in points:
        above = below = 1
        for other, _ in points:
            if other != here:
                above, below = above * other % PRIME, below * (other - here) % PRIME
        secret += value * above * pow(below, -1, PRIME)
    secret %= PRIME
    if secret.bit_length() > 8 * SECRET_BYTES:
        raise ProtocolError("Shares of a secret do not belong together.")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value_at(coefficients: list[int], where: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * where + coefficient) % PRIME
    return value
