"""Clients whose worker masks what they have come to: all learn the sum over all workers, and nobody a part of it.

The workers are the clients of a secure sum, and the first of them is its server besides: it sees the others'
vectors as masks have made them. A round's keys are made for it and forgotten with it. Sums are of whole numbers:
they are the same whatever the masks were, and a run comes to the same bits again.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.errors import SpecError
from shoal.model.replica import Replica
from shoal.spec.averaging import Clip
from shoal.strategies.average.federated import ClientTurns
from shoal.strategies.average.outer import clip_
from shoal.strategies.base import Setting
from shoal.strategies.groups.plain import broadcast_plain, receive_plain, send_plain, share_plain
from shoal.strategies.groups.vector_sums import VectorSums
from shoal.strategies.groups.vectors import Vectors

if TYPE_CHECKING:
    from shoal.comm.secure_sum import SecureClient, SecureServer

_MASKED_BYTES = 8
"""Of each element, once it is masked."""


class SecureAverage(ClientTurns):
    """One worker's part in it."""

    def open(self, replica: Replica, setting: Setting) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError:
            raise SpecError(
                "average: secure=on agrees on masks by the package cryptography, which is not installed; run pip "
                "install shoal[privacy]."
            ) from None
        super().open(replica, setting)

    @torch.no_grad()
    def _mean_difference(self, shares: torch.Tensor, *, clip: Clip | None, sums: VectorSums) -> Vectors:
        """The same as without masks, but for rounding to multiples of 2^-32."""
        found = self._values.read()
        for kind, vector in found.items():
            vector.sub_(self._agreed[kind])
        clip_(self._values.params_of(found), clip)
        own = np.concatenate([vector.double().numpy() for vector in found.values()]) * float(shares[self._index])
        total, start = torch.from_numpy(self._secure_sum(own)), 0
        for vector in found.values():
            vector.copy_(total[start : start + len(vector)])
            start += len(vector)
        return found

    def _secure_sum(self, own: np.ndarray) -> np.ndarray:
        """That of all workers' vectors, which all come to."""
        from shoal.comm.secure_sum import FixedPoint, SecureClient, SecureServer

        numbers = FixedPoint(self._size)
        threshold, context = self._size // 2 + 1, b"step %d" % self._step
        client = SecureClient(self._index, threshold, context)
        server = SecureServer(threshold, len(own), context) if self._index == 0 else None
        sealed = self._agree_on_masks(client, server)
        masked = client.mask(numbers.encode(own), sealed).vector
        total = self._bring_together(client, server, masked)
        return numbers.decode(total)

    def _agree_on_masks(self, client: SecureClient, server: SecureServer | None) -> dict[int, bytes]:
        """Phases 1 and 2; what others have sealed for this worker."""
        from shoal.comm.secure_sum import PublicKeys, SealedShares

        keys = client.advertise()
        shown = share_plain([_text(keys.sealing), _text(keys.masking)], self._group)
        roster = {number: PublicKeys(number, _bytes(a), _bytes(b)) for number, (a, b) in enumerate(shown)}
        if server is not None:
            for told in roster.values():
                server.on_keys(told)
            server.close_keys()
        own = client.share(roster)
        shared = share_plain({str(to): _text(text) for to, text in own.by_receiver.items()}, self._group)
        everybodys = [
            SealedShares(n, {int(to): _bytes(text) for to, text in each.items()}) for n, each in enumerate(shared)
        ]
        if server is not None:
            for each in everybodys:
                server.on_shares(each)
            server.close_shares()
        return {each.sender: each.by_receiver[self._index] for each in everybodys if each.sender != self._index}

    def _bring_together(self, client: SecureClient, server: SecureServer | None, masked: np.ndarray) -> np.ndarray:
        """Phases 3 and 4: masked vectors go to the first worker alone, which tells all their sum."""
        from shoal.comm.secure_sum import MaskedInput, UnmaskingShares

        total = torch.zeros(len(masked), dtype=torch.int64)
        if server is None:
            self._group.send(torch.from_numpy(masked.view(np.int64)), 0).wait()
        else:
            server.on_input(MaskedInput(self._index, masked))
            for sender in range(1, self._size):
                room = torch.empty(len(masked), dtype=torch.int64)
                self._group.receive(room, sender).wait()
                server.on_input(MaskedInput(sender, room.numpy().view(np.uint64)))
        stayed = sorted(server.close_inputs()) if server is not None else []
        told = client.unmask(broadcast_plain(stayed, 0, self._group))
        if server is None:
            send_plain({str(number): hex(share) for number, share in told.of_seeds.items()}, 0, self._group)
        else:
            server.on_unmasking(told)
            for sender in range(1, self._size):
                seeds = receive_plain(sender, self._group)
                of_seeds = {int(number): int(share, 16) for number, share in seeds.items()}
                server.on_unmasking(UnmaskingShares(sender, of_seeds, {}))
            total = torch.from_numpy(server.close_unmasking().view(np.int64))
        return self._group.broadcast_(total).numpy().view(np.uint64)

    def _wire(self) -> dict[str, Any]:
        """What each worker but the first has sent of its values: 64 bits for each of 32, say, in every round."""
        rounds = self._step // self._spec.round_steps(self._size)
        raw = sum(vector.nbytes for vector in self._agreed.values())
        masked = _MASKED_BYTES * sum(len(vector) for vector in self._agreed.values())
        return {"kind": "masked", "raw_bytes": rounds * raw, "wire_bytes": rounds * masked}


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return b64decode(text)
