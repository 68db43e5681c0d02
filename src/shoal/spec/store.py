"""Where a coordinator keeps what its successor must know, as the user writes it.

etcd://10.0.0.1:2379/team/job                          etcd, under this prefix
etcds://a:2379,b:2379/job?ca=FILE&cert=FILE&key=FILE    over TLS; who answers first
etcd://10.0.0.1:2379?login=FILE                         user:password in a file that is yours alone (mode 0600)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from shoal.errors import SpecError, unknown

SCHEMES = ("etcd", "etcds")
LOGIN_VARIABLE = "SHOAL_ETCD_LOGIN"
"""`user:password`, where no file has them."""
_PREFIX = "shoal"
_PORT = "2379"
_KEYS = ("ca", "cert", "key", "login")
_SHOWN = "write etcd://host:2379/prefix, or etcds://… for TLS"


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """An etcd, and how to get in."""

    endpoints: tuple[str, ...]
    """As `https://host:2379`; all of one cluster."""
    prefix: str
    """Of all keys: tells jobs apart."""
    ca: str = ""
    cert: str = ""
    key: str = ""
    """Files for TLS: who is trusted, and how this job proves itself."""
    login: str = ""
    """A file with `user:password`; nothing: `SHOAL_ETCD_LOGIN` has them, or nobody asks."""

    @classmethod
    def parse(cls, text: str) -> StoreAddress:
        """What was written; SpecError where it means nothing. What may be a password is never repeated."""
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise SpecError(f"Cluster: store={text.partition('@')[2] or text} is none that is known; {_SHOWN}.")
        if "@" in parts.netloc:
            raise SpecError(
                f"Cluster: store names a user, which lists of processes would show; put user:password into "
                f"{LOGIN_VARIABLE}, or into a file of mode 0600 and write ?login=FILE."
            )
        hosts = [one for one in parts.netloc.split(",") if one]
        if not hosts or not all(re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?", one) for one in hosts):
            raise SpecError(f"Cluster: store={text} names no host; {_SHOWN}.")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        for name in given:
            if name not in _KEYS:
                raise unknown("Cluster: store's key", name, _KEYS)
        place = cls(
            endpoints=tuple(_endpoint(one, secure=parts.scheme == "etcds") for one in hosts),
            prefix=parts.path.strip("/") or _PREFIX,
            **given,
        )
        if not place.is_secure and (place.ca or place.cert or place.key):
            raise SpecError(f"Cluster: store={text} has files for TLS, which etcds:// is for; write that.")
        if bool(place.cert) != bool(place.key):
            raise SpecError(f"Cluster: store={text} needs cert= and key= together; give both, or neither.")
        return place

    @property
    def is_secure(self) -> bool:
        """Whether it is spoken to over TLS."""
        return self.endpoints[0].startswith("https:")


def _endpoint(host: str, *, secure: bool) -> str:
    has_port = re.search(r":\d+$", host) and not host.endswith("]")
    return f"http{'s' * secure}://{host if has_port else f'{host}:{_PORT}'}"
