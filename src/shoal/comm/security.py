"""The key of a run: whoever has it belongs to the run, and nobody else is let in.

One secret is all that has to travel. The passwords and key pairs that ZeroMQ wants, proofs and the certificate
for TLS are derived from it, so that neither they nor anything a listener learns from a caller leads back to it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from shoal.errors import SpecError

_SECRET_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class CurvePair:
    """A key pair as ZeroMQ's CURVE takes it, in Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class RunKey:
    """The credential of membership in one run. Its `repr` does not show it."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != _SECRET_BYTES:
            raise SpecError(f"A run's key has {_SECRET_BYTES} bytes, found {len(self.secret)}.")

    @classmethod
    def create(cls) -> RunKey:
        """A new key, from the system's source of randomness."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def from_text(cls, text: str) -> RunKey:
        """The key that `text` wrote."""
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            secret = b""
        # fromhex() forgives spaces between digits; a file that has them was not written by us.
        if len(text) != 2 * _SECRET_BYTES or len(secret) != _SECRET_BYTES:
            raise SpecError(
                f"A run's key is {2 * _SECRET_BYTES} hexadecimal digits, found something else of {len(text)} "
                "characters; copy the whole key."
            )
        return cls(secret)

    @property
    def text(self) -> str:
        """The key in hexadecimal digits. Show it to nobody."""
        return self.secret.hex()

    def save(self, path: str | Path) -> None:
        """Write a new file that nobody else could read at any moment."""
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, stat.S_IRUSR | stat.S_IWUSR)
        except OSError as error:
            raise SpecError(
                f"The run's key cannot be saved in {path} ({error.strerror}); name a new file in your own folder."
            ) from None
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(self.text + "\n")

    @classmethod
    def load(cls, path: str | Path) -> RunKey:
        """The key in a file that `save` wrote; refuses one that others could have read or written."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                raw = file.read(2 * _SECRET_BYTES + 2)
        except OSError as error:
            raise SpecError(f"The run's key cannot be read from {path} ({error.strerror}).") from None
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
            raise SpecError(
                f"The run's key in {path} must be yours alone (mode 0600), found mode "
                f"{stat.S_IMODE(status.st_mode):04o} and user {status.st_uid}; make a new key, as others may have "
                "seen this one."
            )
        try:
            return cls.from_text(raw.decode("ascii", "replace").removesuffix("\n"))
        except SpecError as error:
            raise SpecError(f"The file {path} holds no run's key: {error}") from None

    def password(self, address: str) -> bytes:
        """What opens the listener at this address.

        Each address has its own: who takes over the port of a process that died learns, from those who call
        there, nothing that opens another.
        """
        return self._derive(b"password", address.encode()).hex().encode()

    def proof(self, purpose: bytes, about: bytes) -> bytes:
        """What shows that one has the key, and is good for nothing else."""
        return self._derive(purpose, about)

    def certificate_seed(self) -> bytes:
        """What the run's certificate for TLS is made from."""
        return self._derive(b"certificate")

    def listener_pair(self) -> CurvePair:
        """What a listener proves itself with where connections are encrypted."""
        return _pair(self._derive(b"listener"))

    def caller_pair(self) -> CurvePair:
        """What a caller proves itself with where connections are encrypted."""
        return _pair(self._derive(b"caller"))

    def _derive(self, purpose: bytes, about: bytes = b"") -> bytes:
        return blake2b(about, digest_size=32, key=self.secret, person=purpose).digest()


def leaves_host(address: str) -> bool:
    """Whether what is sent to this address may pass through a network that others can listen to."""
    transport, _, rest = address.partition("://")
    if transport == "ipc":
        return False
    try:
        return not ipaddress.ip_address(host_of(rest)).is_loopback
    except ValueError:
        return True  # A name may lead anywhere.


def host_of(host_and_port: str) -> str:
    """The host in `host:port` or `[host]:port`."""
    return host_and_port.rpartition(":")[0].strip("[]")


def _pair(secret: bytes) -> CurvePair:
    # Not above: who makes or hands on a key needs no ZeroMQ.
    from zmq import curve_public
    from zmq.utils import z85

    text = z85.encode(secret)
    return CurvePair(curve_public(text), text)
