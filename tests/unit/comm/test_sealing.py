"""A run's key, sealed for one reader."""

from __future__ import annotations

import pytest

from shoal.comm.sealing import SealingPair, agreed, seal
from shoal.comm.security import RunKey
from shoal.errors import ProtocolError


@pytest.mark.parametrize(
    ("secret", "public", "shared"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_the_agreement_is_that_of_rfc_7748(secret: str, public: str, shared: str) -> None:
    assert agreed(bytes.fromhex(secret), bytes.fromhex(public)).hex() == shared


def test_only_the_reader_opens_it() -> None:
    key, reader = RunKey.create(), SealingPair.create()
    sealed = seal(key, reader.public)
    assert reader.open(sealed).secret == key.secret
    assert key.secret not in sealed and seal(key, reader.public) != sealed
    with pytest.raises(ProtocolError, match="for another reader, or changed"):
        SealingPair.create().open(sealed)


@pytest.mark.parametrize("where", [0, 40, 70])
def test_what_was_changed_on_its_way_is_refused(where: int) -> None:
    reader = SealingPair.create()
    sealed = bytearray(seal(RunKey.create(), reader.public))
    sealed[where] ^= 1
    with pytest.raises(ProtocolError):
        reader.open(bytes(sealed))
    with pytest.raises(ProtocolError):
        reader.open(bytes(sealed)[:50])


def test_a_pair_does_not_show_its_secret() -> None:
    pair = SealingPair.create()
    assert repr(pair.secret) not in repr(pair)
