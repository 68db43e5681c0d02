"""A run's key for one reader alone: sealed with what the reader shows to everybody, opened with what it keeps.

Somebody else's system carries it (Ray's calls, Spark's tasks), where others may read along. The agreement on a
secret is X25519 (RFC 7748), once for each key and reader, which Python's `ssl` does not offer.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

from shoal.comm.security import RunKey
from shoal.errors import ProtocolError

_PRIME = 2**255 - 19
_BITS = 255
_A24 = 121665
_BASE = (9).to_bytes(32, "little")
_POINT_BYTES = 32


@dataclass(frozen=True)
class SealingPair:
    """What a reader has: `public` is for everybody."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def create(cls) -> SealingPair:
        """A new pair, for one key."""
        return cls.of(secrets.token_bytes(_POINT_BYTES))

    @classmethod
    def of(cls, secret: bytes) -> SealingPair:
        """The pair that this secret belongs to."""
        return cls(agreed(secret, _BASE), secret)

    def open(self, sealed: bytes) -> RunKey:
        """The key that `seal` took. ProtocolError where it was sealed for somebody else, or was changed."""
        theirs, hidden, mark = sealed[:_POINT_BYTES], sealed[_POINT_BYTES:-_POINT_BYTES], sealed[-_POINT_BYTES:]
        pad, proof = _pad_and_proof(agreed(self.secret, theirs), theirs, self.public, hidden)
        if len(hidden) != len(pad) or not secrets.compare_digest(proof, mark):
            raise ProtocolError("A run's key was sealed for another reader, or changed on its way.")
        return RunKey(_xor(hidden, pad))


def seal(key: RunKey, public: bytes) -> bytes:
    """The key, so that only the pair with this public half opens it."""
    once = SealingPair.create()
    shared = agreed(once.secret, public)
    hidden = _xor(key.secret, _pad_and_proof(shared, once.public, public, b"")[0])
    return once.public + hidden + _pad_and_proof(shared, once.public, public, hidden)[1]


def agreed(secret: bytes, public: bytes) -> bytes:
    """What both ends of X25519 come to, each from its own secret and the other's public half."""
    if len(public) != _POINT_BYTES:
        raise ProtocolError(f"A public key has {_POINT_BYTES} bytes, found {len(public)}.")
    factor = int.from_bytes(secret, "little") & ((1 << 254) - 8) | (1 << 254)
    x1 = int.from_bytes(public, "little") & ((1 << _BITS) - 1)
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in reversed(range(_BITS)):
        is_set = factor >> bit & 1
        if is_set:
            x2, z2, x3, z3 = x3, z3, x2, z2
        x2, z2, x3, z3 = _rung(x1, x2, z2, x3, z3)
        if is_set:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, _PRIME - 2, _PRIME) % _PRIME).to_bytes(_POINT_BYTES, "little")


def _rung(x1: int, x2: int, z2: int, x3: int, z3: int) -> tuple[int, int, int, int]:
    """One step of the ladder: twice one point, and the sum of both, whose difference is `x1`."""
    plus, minus = (x2 + z2) ** 2, (x2 - z2) ** 2
    left, right = (x3 - z3) * (x2 + z2), (x3 + z3) * (x2 - z2)
    gap = plus - minus
    return (
        plus * minus % _PRIME,
        gap * (plus + _A24 * gap) % _PRIME,
        (left + right) ** 2 % _PRIME,
        x1 * (left - right) ** 2 % _PRIME,
    )


def _pad_and_proof(shared: bytes, sender: bytes, reader: bytes, hidden: bytes) -> tuple[bytes, bytes]:
    """What hides the key, and what shows that nobody has changed it."""
    pad = blake2b(sender + reader, digest_size=32, key=shared, person=b"sealed key").digest()
    return pad, blake2b(sender + reader + hidden, digest_size=32, key=shared, person=b"sealed proof").digest()


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
