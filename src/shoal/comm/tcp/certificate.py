"""A certificate from 32 bytes: whoever has them makes the same one, so that none has to be sent to anybody.

TLS wants a key pair and a certificate of it, and Python's `ssl` makes neither. OpenSSL does all that happens on a
connection; what is made here is made once: the public key of an Ed25519 pair (RFC 8032), and the certificate that
it signs itself (X.509, RFC 8410). Its validity has no end, so that no host's clock matters.
"""

from __future__ import annotations

import base64
import ssl
from hashlib import sha512

_PRIME = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_CURVE = -121665 * pow(121666, -1, _PRIME) % _PRIME
_Point = tuple[int, int]
_ZERO: _Point = (0, 1)
_BASE: _Point = (
    15112221349535400772501151409588531511454012693041857206046113283949847762202,
    46316835694926478169428394003475163141307993866256225615783033603165251855960,
)

_INTEGER, _BITS, _OCTETS, _OBJECT, _UTF8 = 0x02, 0x03, 0x04, 0x06, 0x0C
_TIME, _LONG_TIME, _SEQUENCE, _SET = 0x17, 0x18, 0x30, 0x31
_ED25519, _COMMON_NAME = bytes.fromhex("2b6570"), bytes.fromhex("550403")
_NAME = b"a run of Shoal"
_BEGIN, _END = b"700101000000Z", b"99991231235959Z"


def certificate_and_key(seed: bytes) -> tuple[str, str]:
    """The certificate and the private key that belong to these 32 bytes, as OpenSSL reads them (PEM)."""
    algorithm = _der(_SEQUENCE, _der(_OBJECT, _ED25519))
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_OBJECT, _COMMON_NAME), _der(_UTF8, _NAME))))
    validity = _der(_SEQUENCE, _der(_TIME, _BEGIN), _der(_LONG_TIME, _END))
    public = _der(_SEQUENCE, algorithm, _der(_BITS, b"\0", public_key(seed)))
    content = _der(_SEQUENCE, _der(_INTEGER, b"\1"), algorithm, name, validity, name, public)
    certificate = _der(_SEQUENCE, content, algorithm, _der(_BITS, b"\0", sign(seed, content)))
    private = _der(_SEQUENCE, _der(_INTEGER, b"\0"), algorithm, _der(_OCTETS, _der(_OCTETS, seed)))
    return ssl.DER_cert_to_PEM_cert(certificate), _pem("PRIVATE KEY", private)


def public_key(seed: bytes) -> bytes:
    """The public half of a pair."""
    return _packed(_times(_secret_number(seed), _BASE))


def sign(seed: bytes, message: bytes) -> bytes:
    """What proves that whoever has the seed has said this."""
    secret, prefix = _secret_number(seed), sha512(seed).digest()[32:]
    once = _number(sha512(prefix + message).digest()) % _ORDER
    point = _packed(_times(once, _BASE))
    challenge = _number(sha512(point + public_key(seed) + message).digest()) % _ORDER
    return point + ((once + challenge * secret) % _ORDER).to_bytes(32, "little")


def _secret_number(seed: bytes) -> int:
    number = _number(sha512(seed).digest()[:32])
    return number & ((1 << 254) - 8) | (1 << 254)


def _number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def _packed(point: _Point) -> bytes:
    x, y = point
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _times(factor: int, point: _Point) -> _Point:
    total = _ZERO
    while factor:
        if factor & 1:
            total = _plus(total, point)
        point = _plus(point, point)
        factor >>= 1
    return total


def _plus(one: _Point, other: _Point) -> _Point:
    (x1, y1), (x2, y2) = one, other
    product = _CURVE * x1 * x2 * y1 * y2 % _PRIME
    inverse = pow(1 - product * product, -1, _PRIME)  # one inversion for both divisions below
    x = (x1 * y2 + x2 * y1) * (1 - product) * inverse
    y = (y1 * y2 + x1 * x2) * (1 + product) * inverse
    return x % _PRIME, y % _PRIME


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    length = bytes([size]) if size < 0x80 else bytes([0x82, size >> 8, size & 0xFF])
    if 0x80 <= size < 0x100:
        length = bytes([0x81, size])
    return bytes([tag]) + length + content


def _pem(kind: str, content: bytes) -> str:
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(content).decode()}-----END {kind}-----\n"
