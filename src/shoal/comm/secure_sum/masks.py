"""Keys of one round, what two of them agree on, and the masks that follow from that."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from shoal.comm.secure_sum.shares import SHARE_BYTES
from shoal.errors import ProtocolError

_KEY_BYTES = 32
_NONCE = bytes(12)
"""Every key seals one message alone, so that none needs a number."""


def public_of(secret: bytes) -> bytes:
    """The public half of a secret key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agreed_key(secret: bytes, public: bytes, purpose: bytes) -> bytes:
    """What both sides come to, for one purpose alone."""
    try:
        shared = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise ProtocolError(f"What should be a public key is none ({error}).") from None
    return derived_key(shared, purpose)


def derived_key(secret: bytes, purpose: bytes) -> bytes:
    """A key that tells nothing of the secret, nor of those for other purposes."""
    return HKDF(algorithm=SHA256(), length=_KEY_BYTES, salt=None, info=b"shoal secure sum " + purpose).derive(
        secret
    )


def mask_of(key: bytes, length: int) -> np.ndarray:
    """So many numbers of 64 bits that look like chance to who does not know the key."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * length)), dtype="<u8")


def seal_shares(key: bytes, seed_share: int, key_share: int, context: bytes) -> bytes:
    """Two shares, for whoever has the key."""
    plain = seed_share.to_bytes(SHARE_BYTES, "big") + key_share.to_bytes(SHARE_BYTES, "big")
    return ChaCha20Poly1305(key).encrypt(_NONCE, plain, context)


def open_shares(key: bytes, sealed: bytes, context: bytes) -> tuple[int, int]:
    """What `seal_shares` took; ProtocolError where it was sealed for somebody else, or was changed."""
    from cryptography.exceptions import InvalidTag

    try:
        plain = ChaCha20Poly1305(key).decrypt(_NONCE, sealed, context)
    except InvalidTag:
        raise ProtocolError("Shares of a secure sum were sealed for another, or changed on their way.") from None
    return int.from_bytes(plain[:SHARE_BYTES], "big"), int.from_bytes(plain[SHARE_BYTES:], "big")
