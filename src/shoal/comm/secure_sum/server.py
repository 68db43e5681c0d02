"""The server's part in a secure sum: it carries what clients tell each other, and comes to the sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

import numpy as np

from shoal.comm.secure_sum.masks import agreed_key, derived_key, mask_of, public_of
from shoal.comm.secure_sum.messages import (
    MaskedInput,
    PublicKeys,
    SealedShares,
    UnmaskingShares,
    check_threshold,
)
from shoal.comm.secure_sum.shares import join
from shoal.errors import ProtocolError


class ServerPhase(Enum):
    """What a server waits for."""

    KEYS = "keys"
    SHARES = "shares"
    INPUTS = "masked vectors"
    UNMASKING = "shares of others"
    DONE = "nothing"


class SecureServer:
    """One round. Whoever drives it closes a phase when all have answered, or when it has waited long enough: who
    has not answered by then is gone."""

    def __init__(self, threshold: int, length: int, context: bytes) -> None:
        """`length`: numbers of each vector; `context`: the round's name, which all know."""
        self.threshold, self._length, self._context = threshold, length, context
        self.phase = ServerPhase.KEYS
        self._roster: dict[int, PublicKeys] = {}
        self._sealed: dict[int, Mapping[int, bytes]] = {}
        self._stayed: set[int] = set()
        self._total = np.zeros(length, dtype="<u8")
        self._shares: dict[int, UnmaskingShares] = {}

    # What clients say.

    def on_keys(self, told: PublicKeys) -> None:
        """Phase 1."""
        self._expect(ServerPhase.KEYS, told.sender, told.sender not in self._roster)
        self._roster[told.sender] = told

    def on_shares(self, told: SealedShares) -> None:
        """Phase 2."""
        self._expect(
            ServerPhase.SHARES, told.sender, told.sender in self._roster and told.sender not in self._sealed
        )
        if told.by_receiver.keys() != self._roster.keys() - {told.sender}:
            raise ProtocolError(f"Client {told.sender} of a secure sum has not sealed a share for each other one.")
        self._sealed[told.sender] = told.by_receiver

    def on_input(self, told: MaskedInput) -> None:
        """Phase 3."""
        self._expect(
            ServerPhase.INPUTS, told.sender, told.sender in self._sealed and told.sender not in self._stayed
        )
        if told.vector.shape != (self._length,) or told.vector.dtype != np.dtype("<u8"):
            raise ProtocolError(
                f"Client {told.sender} of a secure sum sent {told.vector.shape} of {told.vector.dtype}, not "
                f"{self._length} numbers of 64 bits."
            )
        self._stayed.add(told.sender)
        self._total += told.vector

    def on_unmasking(self, told: UnmaskingShares) -> None:
        """Phase 4."""
        self._expect(
            ServerPhase.UNMASKING, told.sender, told.sender in self._sealed and told.sender not in self._shares
        )
        if told.of_seeds.keys() != self._stayed or told.of_keys.keys() != self._sealed.keys() - self._stayed:
            raise ProtocolError(
                f"Client {told.sender} of a secure sum gave shares of others than it was asked for."
            )
        self._shares[told.sender] = told

    # What it tells them.

    def close_keys(self) -> dict[int, PublicKeys]:
        """For all who have shown keys: whose there are."""
        self._close(ServerPhase.KEYS, ServerPhase.SHARES, len(self._roster))
        check_threshold(self.threshold, len(self._roster))
        return dict(self._roster)

    def close_shares(self) -> dict[int, dict[int, bytes]]:
        """By client that has shared its secrets: what the others have sealed for it, by sender."""
        self._close(ServerPhase.SHARES, ServerPhase.INPUTS, len(self._sealed))
        return {
            receiver: {sender: sealed[receiver] for sender, sealed in self._sealed.items() if sender != receiver}
            for receiver in self._sealed
        }

    def close_inputs(self) -> frozenset[int]:
        """For all who have shared their secrets: whose vectors are in the sum."""
        self._close(ServerPhase.INPUTS, ServerPhase.UNMASKING, len(self._stayed))
        return frozenset(self._stayed)

    def close_unmasking(self) -> np.ndarray:
        """The sum of the vectors of all who stayed, modulo 2^64."""
        self._close(ServerPhase.UNMASKING, ServerPhase.DONE, len(self._shares))
        for number in sorted(self._stayed):
            seed = self._joined(number, lambda told: told.of_seeds)
            self._total -= mask_of(derived_key(seed, b"own " + self._context), self._length)
        for gone in sorted(self._sealed.keys() - self._stayed):
            self._take_off(gone, self._joined(gone, lambda told: told.of_keys))
        return self._total

    def _take_off(self, gone: int, secret: bytes) -> None:
        """What those who stayed have added or taken away for one who is gone."""
        if public_of(secret) != self._roster[gone].masking:
            raise ProtocolError(f"The shares of client {gone} of a secure sum give another key than it has shown.")
        for number in sorted(self._stayed):
            shared = agreed_key(secret, self._roster[number].masking, b"mask " + self._context)
            mask = mask_of(shared, self._length)
            if gone > number:
                self._total -= mask
            else:
                self._total += mask

    def _joined(self, number: int, of: Callable[[UnmaskingShares], Mapping[int, int]]) -> bytes:
        return join({sender: of(told)[number] for sender, told in self._shares.items()}, self.threshold)

    def _expect(self, phase: ServerPhase, sender: int, is_due: bool) -> None:
        if self.phase is not phase or not is_due:
            raise ProtocolError(
                f"Client {sender} of a secure sum sent {phase.value}, which nobody waits for: it is the time of "
                f"{self.phase.value}."
            )

    def _close(self, now: ServerPhase, after: ServerPhase, count: int) -> None:
        if self.phase is not now:
            raise ProtocolError(f"A secure sum waits for {self.phase.value}, not for {now.value}.")
        if count < self.threshold:
            raise ProtocolError(
                f"A secure sum got {now.value} from {count} clients, and it takes {self.threshold}; the round is "
                "given up, and nobody's vector is told."
            )
        self.phase = after
