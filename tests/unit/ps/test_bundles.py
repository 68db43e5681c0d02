"""Which messages for one node share a packet."""

import pytest

from shoal.ps.messages import Hello, Values
from shoal.ps.node import bundles, decode_bundle, encode_bundle

SMALL = Hello(shard=0, generation=1)
BULK = Values(shard=0, generation=1, ticket=1, version=1, part=0, parts=1, frames=(b"bulk",))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], []),
        ([SMALL, SMALL], [[SMALL, SMALL]]),
        ([BULK, BULK], [[BULK], [BULK]]),
        ([SMALL, BULK, SMALL, SMALL], [[SMALL, BULK], [SMALL, SMALL]]),
    ],
)
def test_bulk_closes_its_packet_and_order_is_kept(messages, expected):
    assert list(bundles(messages)) == expected
    arrived = [message for bundle in bundles(messages) for message in decode_bundle(encode_bundle(7, bundle))[1]]
    assert arrived == messages
