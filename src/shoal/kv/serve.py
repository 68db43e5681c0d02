"""One server's process: `python -m shoal.kv.serve`, started by `KvServers`, which writes the key to its input."""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch

from shoal.arena.malloc import keep_freed_memory
from shoal.comm.codec import decode, encode
from shoal.comm.kernel import die_with_parent
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import ProtocolError
from shoal.kv.desk import KvDesk, StoreConsistency
from shoal.kv.messages import read_kv_request, write_kv_answer
from shoal.kv.vault import Vault

_LOOK_EVERY_S = 0.1


class KvServer:
    """A desk on an authenticated wire."""

    def __init__(self, desk: KvDesk, address: str, key: RunKey) -> None:
        self._desk = desk
        self._wire = ZmqWire(address, key=key)
        self._callers: dict[bytes, tuple[int, str]] = {}

    def run(self) -> None:
        """Serve without end."""
        while True:
            self.serve_once()

    def serve_once(self) -> None:
        """The next request, if one comes soon."""
        packet = self._wire.poll(_LOOK_EVERY_S)
        for peer in self._wire.gone():
            self._wire.disconnect(peer)
        if packet is None:
            return
        try:
            request, reply_to = read_kv_request(decode(packet))
        except ProtocolError:
            return  # damaged on the way, or nothing of ours: it is asked for again
        self._callers.setdefault(request.client, (len(self._callers), reply_to))
        for client, answer in self._desk.take(request):
            peer, address = self._callers[client]
            if peer not in self._wire.peers:
                self._wire.connect(peer, address)
            self._wire.transmit(peer, encode(write_kv_answer(answer)))

    def close(self) -> None:
        """Serve nobody any more."""
        self._wire.close()


def main() -> None:
    """Serve the vault of a descriptor until whoever started this ends."""
    parser = argparse.ArgumentParser(prog="python -m shoal.kv.serve", description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--workers", type=int, required=True)
    given = parser.parse_args()
    die_with_parent(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the workers, and servers end with them
    torch.set_num_threads(1)
    keep_freed_memory()
    key = RunKey.from_text(sys.stdin.readline().strip())
    desk = KvDesk(Vault(given.fd), StoreConsistency.parse(given.kind), given.workers)
    KvServer(desk, given.address, key).run()


if __name__ == "__main__":
    main()
