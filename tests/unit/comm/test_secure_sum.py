"""Whoever leaves in whatever phase: the sum of the others is exact, and nobody's part can be seen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from shoal.comm.secure_sum import FixedPoint, MaskedInput, SecureClient, SecureServer
from shoal.comm.secure_sum.masks import agreed_key, mask_of
from shoal.comm.secure_sum.shares import cut, join
from shoal.errors import ProtocolError

LENGTH = 40


class Round:
    """One round of a secure sum: who leaves before which phase is said beforehand."""

    def __init__(
        self, vectors: list[np.ndarray], threshold: int, gone: Collection[Collection[int]], context: bytes = b"1"
    ) -> None:
        self.clients = [SecureClient(number, threshold, context) for number in range(len(vectors))]
        self.server = SecureServer(threshold, len(vectors[0]), context)
        self.received: dict[int, np.ndarray] = {}
        """By client: all that the server got of its vector."""
        here = set(range(len(vectors)))
        before_keys, before_shares, before_inputs, before_unmasking = (set(each) for each in gone)
        for number in sorted(here := here - before_keys):
            self.server.on_keys(self.clients[number].advertise())
        roster = self.server.close_keys()
        for number in sorted(here := here - before_shares):
            self.server.on_shares(self.clients[number].share(roster))
        boxes = self.server.close_shares()
        for number in sorted(here := here - before_inputs):
            told = self.clients[number].mask(vectors[number], boxes[number])
            self.received[number] = told.vector.copy()
            self.server.on_input(told)
        self.stayed = self.server.close_inputs()
        for number in sorted(here - before_unmasking):
            self.server.on_unmasking(self.clients[number].unmask(self.stayed))
        self.total = self.server.close_unmasking()


def vectors_of(count: int, length: int = LENGTH, seed: int = 0) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [chance.integers(0, 2**64, length, dtype=np.uint64) for _ in range(count)]


def sum_of(vectors: list[np.ndarray], numbers: Collection[int]) -> np.ndarray:
    return np.sum([vectors[number] for number in sorted(numbers)], axis=0, dtype=np.uint64)


def test_with_three_of_ten_gone_in_mid_round_the_sum_of_the_rest_is_exact() -> None:
    vectors = vectors_of(10)
    found = Round(vectors, 6, [(), (), (1, 4, 8), ()])
    assert found.stayed == {0, 2, 3, 5, 6, 7, 9}
    assert np.array_equal(found.total, sum_of(vectors, found.stayed))


@pytest.mark.parametrize("phase", range(4))
def test_whoever_leaves_in_any_phase(phase: int) -> None:
    vectors, gone = vectors_of(7), [(), (), (), ()]
    gone[phase] = (0, 3, 6)  # type: ignore[call-overload]
    found = Round(vectors, 4, gone)
    expected = set(range(7)) if phase == 3 else {1, 2, 4, 5}
    assert found.stayed == expected
    assert np.array_equal(found.total, sum_of(vectors, expected))


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 7), st.data())
def test_any_drop_outs_leave_an_exact_sum_or_none(count: int, data: st.DataObject) -> None:
    phases = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    gone = [{number for number, phase in enumerate(phases) if phase == each} for each in range(4)]
    threshold, vectors = max(2, count // 2 + 1), vectors_of(count, 8)
    left = [sum(phase > each or phase > 3 for phase in phases) for each in range(4)]
    if left[0] < threshold or left[-1] < threshold:
        with pytest.raises(ProtocolError):
            Round(vectors, threshold, gone)
        return
    if threshold <= left[0] // 2:  # more took part than it is a majority of
        return
    found = Round(vectors, threshold, gone)
    assert np.array_equal(found.total, sum_of(vectors, found.stayed))


def test_what_the_server_receives_of_one_client_is_uniform() -> None:
    vectors = [np.zeros(20_000, dtype=np.uint64) for _ in range(3)]
    received = Round(vectors, 2, [(), (), (), ()]).received[1]
    every_byte = np.bincount(received.view(np.uint8), minlength=256)
    assert chisquare(every_byte).pvalue > 1e-6
    assert kstest(received / 2.0**64, "uniform").pvalue > 1e-6
    bits = np.unpackbits(received.view(np.uint8)).mean()
    assert abs(bits - 0.5) < 5 / np.sqrt(64 * len(received))


def test_two_rounds_with_equal_updates_look_unrelated() -> None:
    vectors = vectors_of(4, 20_000)
    first, second = (Round(vectors, 3, [(), (), (2,), ()], context) for context in (b"1", b"2"))
    assert np.array_equal(first.total, second.total)
    for number in first.stayed:
        mine, later = first.received[number], second.received[number]
        assert not (mine == later).any()
        # Neither are they alike, nor is their difference: a mask that came again would leave one.
        assert chisquare(np.bincount((later - mine).view(np.uint8), minlength=256)).pvalue > 1e-6
        assert abs(np.corrcoef(mine / 2.0**64, later / 2.0**64)[0, 1]) < 5 / np.sqrt(len(mine))


def test_a_client_that_was_late_is_not_unmasked_by_what_was_given_of_it() -> None:
    """The server has its masks with others by then; its own mask still hides what it sent too late."""
    vectors = vectors_of(4, 20_000)
    clients, server = [SecureClient(number, 3, b"1") for number in range(4)], SecureServer(3, 20_000, b"1")
    for client in clients:
        server.on_keys(client.advertise())
    roster = server.close_keys()
    for client in clients:
        server.on_shares(client.share(roster))
    boxes = server.close_shares()
    told = [client.mask(vectors[client.number], boxes[client.number]) for client in clients]
    for each in told[:3]:
        server.on_input(each)
    stayed = server.close_inputs()
    given = [client.unmask(stayed) for client in clients[:3]]
    for each in given:
        server.on_unmasking(each)
    assert np.array_equal(server.close_unmasking(), sum_of(vectors, stayed))
    with pytest.raises(ProtocolError, match="nobody waits for"):
        server.on_input(told[3])
    secret = join({each.sender: each.of_keys[3] for each in given}, 3)
    left = told[3].vector - vectors[3]
    for number in range(3):
        left += mask_of(agreed_key(secret, roster[number].masking, b"mask 1"), len(left))
    assert chisquare(np.bincount(left.view(np.uint8), minlength=256)).pvalue > 1e-6


def test_keys_are_for_one_round_and_each_phase_is_taken_once() -> None:
    clients = [SecureClient(number, 2, b"1") for number in range(3)]
    roster = {client.number: client.advertise() for client in clients}
    assert len({key for keys in roster.values() for key in (keys.sealing, keys.masking)}) == 6
    with pytest.raises(ProtocolError, match="for one round"):
        clients[0].advertise()
    with pytest.raises(ProtocolError, match="other keys of this client"):
        clients[0].share({**roster, 0: SecureClient(0, 2, b"1").advertise()})
    told = {client.number: client.share(roster) for client in clients[1:]}
    clients[1].mask(vectors_of(1)[0], {2: told[2].by_receiver[1]})
    clients[1].unmask([1, 2])
    with pytest.raises(ProtocolError, match="for one round"):
        clients[1].unmask([1])


def test_a_client_gives_nothing_where_too_few_are_left() -> None:
    clients = [SecureClient(number, 3, b"1") for number in range(4)]
    roster = {client.number: client.advertise() for client in clients}
    told = {client.number: client.share(roster) for client in clients}
    boxes = {to: {sender: each.by_receiver[to] for sender, each in told.items() if sender != to} for to in roster}
    with pytest.raises(ProtocolError, match="nothing is sent"):
        clients[0].mask(vectors_of(1)[0], {1: boxes[0][1]})
    clients[1].mask(vectors_of(1)[0], boxes[1])
    with pytest.raises(ProtocolError, match="nothing is unmasked"):
        clients[1].unmask([1, 2])
    with pytest.raises(ProtocolError, match="more than half"):
        (alone := SecureClient(0, 2, b"1")).share({0: alone.advertise()})


def test_shares_for_others_cannot_be_read_or_changed() -> None:
    clients = [SecureClient(number, 2, b"1") for number in range(3)]
    roster = {client.number: client.advertise() for client in clients}
    told = clients[0].share(roster).by_receiver
    for client in clients[1:]:
        client.share(roster)
    with pytest.raises(ProtocolError, match="sealed for another"):
        clients[1].mask(vectors_of(1)[0], {0: told[2]})
    with pytest.raises(ProtocolError, match="sealed for another"):
        clients[2].mask(vectors_of(1)[0], {0: bytes([told[2][0] ^ 1]) + told[2][1:]})


def test_the_server_takes_nothing_that_was_not_to_come() -> None:
    client, server = SecureClient(0, 2, b"1"), SecureServer(2, LENGTH, b"1")
    keys = client.advertise()
    server.on_keys(keys)
    with pytest.raises(ProtocolError):
        server.on_keys(keys)
    with pytest.raises(ProtocolError, match="it takes 2"):
        server.close_keys()
    server.on_keys(replace(SecureClient(1, 2, b"1").advertise()))
    server.close_keys()
    with pytest.raises(ProtocolError, match="nobody waits for"):
        server.on_input(MaskedInput(0, vectors_of(1)[0]))


def test_shares_give_a_secret_back_and_fewer_do_not() -> None:
    secret = bytes(range(32))
    shares = cut(secret, range(5), 3)
    assert join({number: shares[number] for number in (0, 2, 4)}, 3) == secret
    with pytest.raises(ProtocolError, match="needs 3 shares"):
        join({0: shares[0], 1: shares[1]}, 3)
    with pytest.raises(ProtocolError, match="do not belong together"):
        join({0: shares[0], 1: shares[1] + 2**400, 2: shares[2]}, 3)


def test_sums_of_fractions_are_exact_in_any_order() -> None:
    numbers, chance = FixedPoint(5), np.random.default_rng(3)
    parts = [chance.normal(size=50) * 10 for _ in range(5)]
    encoded = [numbers.encode(part) for part in parts]
    forward, backward = np.sum(encoded, axis=0, dtype=np.uint64), np.sum(encoded[::-1], axis=0, dtype=np.uint64)
    assert np.array_equal(forward, backward)
    assert np.abs(numbers.decode(forward) - np.sum(parts, axis=0)).max() <= 5 * 2.0**-33
    for wrong in (numbers.most, np.nan, -np.inf):
        with pytest.raises(ProtocolError, match="takes numbers below"):
            numbers.encode(np.array([0.0, wrong]))
