"""A client's part in a secure sum. One for each round: it takes each phase once, and its keys go with it."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from enum import Enum

import numpy as np

from shoal.comm.secure_sum.masks import agreed_key, derived_key, mask_of, open_shares, public_of, seal_shares
from shoal.comm.secure_sum.messages import (
    MaskedInput,
    PublicKeys,
    SealedShares,
    UnmaskingShares,
    check_threshold,
)
from shoal.comm.secure_sum.shares import SECRET_BYTES, cut
from shoal.errors import ProtocolError


class ClientPhase(Enum):
    """What a client does next."""

    ADVERTISE = "show its keys"
    SHARE = "share its secrets"
    MASK = "mask its vector"
    UNMASK = "give shares of others"
    DONE = "nothing: the round is over"


class SecureClient:
    """Never gives away what would unmask its own vector alone; `context` is the round's name, which all know."""

    def __init__(self, number: int, threshold: int, context: bytes) -> None:
        self.number, self.threshold, self._context = number, threshold, context
        self.phase = ClientPhase.ADVERTISE
        self._sealing, self._masking, self._seed = (secrets.token_bytes(SECRET_BYTES) for _ in range(3))
        self._others: dict[int, PublicKeys] = {}
        self._kept: dict[int, tuple[int, int]] = {}
        """By client: shares of its seed and of its masking key."""

    def advertise(self) -> PublicKeys:
        """Phase 1."""
        self._enter(ClientPhase.ADVERTISE, ClientPhase.SHARE)
        return PublicKeys(self.number, public_of(self._sealing), public_of(self._masking))

    def share(self, roster: Mapping[int, PublicKeys]) -> SealedShares:
        """Phase 2: `roster` has the keys of all who take part, this client's own among them."""
        self._enter(ClientPhase.SHARE, ClientPhase.MASK)
        check_threshold(self.threshold, len(roster))
        own = roster.get(self.number)
        if own is None or own.masking != public_of(self._masking) or own.sealing != public_of(self._sealing):
            raise ProtocolError("The roster of a secure sum has other keys of this client than it has shown.")
        shown = [key for keys in roster.values() for key in (keys.sealing, keys.masking)]
        if len(set(shown)) != len(shown):
            raise ProtocolError("The roster of a secure sum has one key twice.")
        self._others = {number: keys for number, keys in roster.items() if number != self.number}
        seeds = cut(self._seed, roster, self.threshold)
        keys = cut(self._masking, roster, self.threshold)
        self._kept[self.number] = seeds[self.number], keys[self.number]
        sealed = {}
        for number, other in self._others.items():
            context = self._way(self.number, number)
            key = agreed_key(self._sealing, other.sealing, b"shares " + context)
            sealed[number] = seal_shares(key, seeds[number], keys[number], context)
        return SealedShares(self.number, sealed)

    def mask(self, vector: np.ndarray, sealed: Mapping[int, bytes]) -> MaskedInput:
        """Phase 3: `vector` of 64-bit numbers; `sealed`: by sender, what is for this client. Who sent none is left
        out of all that follows."""
        self._enter(ClientPhase.MASK, ClientPhase.UNMASK)
        if unknown := sealed.keys() - self._others.keys():
            raise ProtocolError(f"Shares of a secure sum came from {sorted(unknown)}, who have shown no keys.")
        if len(sealed) + 1 < self.threshold:
            raise ProtocolError(
                f"Of a secure sum's clients {len(sealed) + 1} have shared their secrets, fewer than the "
                f"{self.threshold} that it takes; nothing is sent."
            )
        for number, text in sealed.items():
            context = self._way(number, self.number)
            key = agreed_key(self._sealing, self._others[number].sealing, b"shares " + context)
            self._kept[number] = open_shares(key, text, context)
        masked = vector.astype("<u8", copy=True)
        masked += mask_of(derived_key(self._seed, b"own " + self._context), len(masked))
        for number in sealed:
            shared = agreed_key(self._masking, self._others[number].masking, b"mask " + self._context)
            if number > self.number:
                masked += mask_of(shared, len(masked))
            else:
                masked -= mask_of(shared, len(masked))
        return MaskedInput(self.number, masked)

    def unmask(self, stayed: Collection[int]) -> UnmaskingShares:
        """Phase 4: `stayed`: whose vectors have come. This client is asked once."""
        self._enter(ClientPhase.UNMASK, ClientPhase.DONE)
        here = set(stayed)
        if not here <= self._kept.keys():
            raise ProtocolError(
                f"Of a secure sum {sorted(here - self._kept.keys())} are told to be left, unknown here."
            )
        if len(here) < self.threshold:
            raise ProtocolError(
                f"Of a secure sum {len(here)} clients are left, fewer than the {self.threshold} that it takes; "
                "nothing is unmasked."
            )
        seeds = {number: seed for number, (seed, _) in self._kept.items() if number in here}
        keys = {number: key for number, (_, key) in self._kept.items() if number not in here}
        self._kept, self._others = {}, {}
        self._sealing = self._masking = self._seed = b""
        return UnmaskingShares(self.number, seeds, keys)

    def _way(self, sender: int, receiver: int) -> bytes:
        return b"%d to %d of " % (sender, receiver) + self._context

    def _enter(self, now: ClientPhase, after: ClientPhase) -> None:
        if self.phase is not now:
            raise ProtocolError(
                f"A client of a secure sum was asked to {now.value}, but what it does next is {self.phase.value}; "
                "a round's keys are for one round."
            )
        self.phase = after
