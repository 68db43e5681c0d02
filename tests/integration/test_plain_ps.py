"""The plain parameter server over real sockets: between threads and processes, and on bad wires."""

from __future__ import annotations

import os
import random
import secrets
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from helpers.addresses import any_address
from helpers.forked import in_processes
from shoal.comm.security import RunKey, leaves_host
from shoal.comm.zmq_wire import ZmqWire
from shoal.errors import CommTimeout, LaunchError, PeerLost, SpecError
from shoal.ps.plain import table
from shoal.ps.plain.line import reply_address
from shoal.ps.plain.table import MOST_NAME_BYTES
from shoal.spec import World

GUARD_S = 60.0
KEY = RunKey.create()


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def client_of(server: shoal.ps.Server, **more) -> shoal.ps.Client:
    return shoal.ps.Client(server.address, key=server.key, timeout_s=GUARD_S, **more)


@contextmanager
def in_thread(work: Callable[[], None]) -> Iterator[None]:
    """Run `work` beside the block; what it raises is raised here."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="shoal-test")
    thread.start()
    yield
    thread.join(GUARD_S)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_one_client_trains_as_a_local_loop_does_bit_by_bit(optimizer):
    torch.manual_seed(0)
    local, remote = nn.Linear(6, 3), nn.Linear(6, 3)
    remote.load_state_dict(local.state_dict())
    local_optimizer = optimizer(list(local.parameters()))
    inputs, targets = torch.randn(20, 4, 6), torch.randn(20, 4, 3)
    with shoal.ps.Server(remote, optimizer=optimizer) as server, client_of(server) as client:
        for step, (x, y) in enumerate(zip(inputs, targets, strict=True), start=1):
            remote.load_state_dict(client.get())
            gradients = torch.autograd.grad(nn.functional.mse_loss(remote(x), y), list(remote.parameters()))
            names = [name for name, _ in remote.named_parameters()]
            assert client.update(dict(zip(names, gradients, strict=True))) == step == client.version
            local_optimizer.zero_grad()
            nn.functional.mse_loss(local(x), y).backward()
            local_optimizer.step()
        for name, param in local.named_parameters():
            assert torch.equal(server.parameters[name], param)
        assert server.version == 20


def regress(address: str, seed: int, *, steps: int) -> float:
    """Train on data of our own until all steps are made; the last loss."""
    generator = torch.Generator().manual_seed(seed)
    with shoal.ps.Client(address, key=KEY, timeout_s=GUARD_S) as client:
        for _ in range(steps):
            values = {name: value.requires_grad_() for name, value in client.get().items()}
            x = torch.randn(32, 3, generator=generator)
            y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 3.0
            loss = (x @ values["w"] + values["b"] - y).square().mean()
            client.update(dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True)))
    return loss.item()


def test_two_processes_train_a_regression_asynchronously():
    """The server is a process of its own, and may well start after its clients."""
    address, steps = f"ipc://@shoal-test-{secrets.token_hex(8)}", 150

    def work(world: World) -> list[float]:
        if world.global_rank:
            return [regress(address, world.global_rank, steps=steps)]
        parameters = {"w": torch.zeros(3, 1), "b": torch.zeros(1)}
        server = shoal.ps.Server(
            parameters, optimizer=lambda params: torch.optim.SGD(params, lr=0.05), address=address, key=KEY
        )
        server.start()  # and goes on serving until all have answered
        deadline = time.monotonic() + GUARD_S
        while server.version < 2 * steps and time.monotonic() < deadline:
            time.sleep(0.01)
        return [
            server.version,
            *(value for tensor in server.parameters.values() for value in tensor.view(-1).tolist()),
        ]

    (version, *values), *losses = in_processes(3, work)
    assert version == 2 * steps
    assert values == pytest.approx([1.0, -2.0, 0.5, 3.0], abs=1e-3)
    assert max(loss for (loss,) in losses) < 1e-3


def test_values_are_stored_averaged_and_read_in_part():
    with (
        shoal.ps.Server({"w": torch.zeros(2), "n": torch.tensor(3)}, address="tcp://[::1]:*") as server,
        client_of(server) as client,
    ):
        assert client.names == ("w", "n")
        assert client.store({"w": torch.tensor([2.0, 4.0])}) == 1
        assert client.average({"w": torch.zeros(2)}, share=0.25) == 2
        got = client.get("w", "w")
        assert list(got) == ["w"] and got["w"].tolist() == [1.5, 3.0]
        got["w"].zero_()  # ours to change
        assert client.get()["w"].tolist() == server.parameters["w"].tolist() == [1.5, 3.0]
        assert client.get("n")["n"] == 3 and client.version == server.version == 2


def test_large_tensors_travel_in_pieces():
    given = {"table": torch.randn(70, 1 << 18), "row": torch.randn((64 << 18) + 1)}  # 70 and 64 MiB
    with shoal.ps.Server(given) as server, client_of(server) as client:
        got = client.get()
        assert all(torch.equal(got[name], given[name]) for name in given)
        assert client.store({"row": -given["row"]}) == 1
        assert torch.equal(server.parameters["row"], -given["row"])


@pytest.mark.parametrize(("compress", "error"), [("zstd", 0.0), ("bf16", 0.1), ("int8", 0.1), ("topk:0.25", 2.0)])
def test_compressed_updates_add_up(compress, error):
    torch.manual_seed(0)
    updates = torch.randn(30, 16, 8)
    with shoal.ps.Server({"w": torch.zeros(16, 8)}) as server, client_of(server, compress=compress) as client:
        for update in updates:
            client.update({"w": update})
        total = torch.zeros(16, 8)
        for update in updates:
            total += update
        far = (server.parameters["w"] - total).abs().max().item()
        # What was rounded off comes with the next update, so errors do not add up.
        assert far <= error and (far > 0) is (compress != "zstd")


def test_what_does_not_fit_is_said_and_changes_nothing():
    frozen = nn.Linear(2, 1)
    frozen.bias.requires_grad_(False)
    with shoal.ps.Server(frozen, optimizer=sgd) as server, client_of(server) as client:
        before = server.parameters
        for change, sentence in [
            (lambda: client.update({"wieght": torch.zeros(1, 2)}), "Did you mean 'weight'"),
            (
                lambda: client.update({"weight": torch.zeros(2)}),
                r"float32 \[2\], but the server has float32 \[1, 2\]",
            ),
            (lambda: client.store({"weight": torch.zeros(1, 2).double()}), r"sent as float64 \[1, 2\]"),
            (lambda: client.update({"bias": torch.ones(1)}), "optimizer does not train it"),
            (lambda: client.average({"weight": torch.ones(1, 2)}, share=1.5), "found 1.5"),
            (lambda: client.get("w"), "'w' is not known"),
        ]:
            with pytest.raises(SpecError, match=sentence):
                change()
        assert server.version == 0
        assert all(torch.equal(server.parameters[name], value) for name, value in before.items())
        assert client.update({"weight": torch.ones(1, 2)}) == 1


class BadWire:
    """Makes all wires drop and repeat packets, and counts what it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.dropped = self.repeated = 0
        self._dice = random.Random(seed)
        genuine = ZmqWire.transmit

        def transmit(wire: ZmqWire, peer: int, packet: list) -> None:
            fate = self._dice.random()
            self.dropped += fate < 0.3
            self.repeated += fate > 0.7
            for _ in range(0 if fate < 0.3 else 2 if fate > 0.7 else 1):
                genuine(wire, peer, packet)

        monkeypatch.setattr(ZmqWire, "transmit", transmit)


def test_on_a_bad_wire_every_change_is_made_once(monkeypatch):
    bad = BadWire(monkeypatch, seed=0)
    versions: list[int] = []

    def add(server: shoal.ps.Server) -> None:
        with client_of(server, patience_s=0.01) as client:
            for _ in range(60):
                versions.append(client.update({"w": torch.ones(3)}))
                assert client.get()["w"].tolist() == [client.version] * 3

    with shoal.ps.Server({"w": torch.zeros(3)}) as server:
        with in_thread(lambda: add(server)):
            add(server)
        assert server.parameters["w"].tolist() == [120.0] * 3 and server.version == 120
    assert sorted(versions) == list(range(1, 121))
    assert bad.dropped > 50 and bad.repeated > 50


def test_without_the_key_there_is_nothing(tmp_path):
    with shoal.ps.Server({"w": torch.ones(1)}) as server:
        with pytest.raises(CommTimeout, match="the key is not its key"):
            shoal.ps.Client(server.address, key=RunKey.create(), timeout_s=1.0)
        assert server.strangers > 0 and server.refused == 0
        server.key.save(tmp_path / "ps.key")
        with shoal.ps.Client(server.address, key=tmp_path / "ps.key") as client:
            assert client.get()["w"].item() == 1.0


def test_a_server_that_stopped_is_missed():
    with shoal.ps.Server({"w": torch.zeros(1)}) as server:
        client = shoal.ps.Client(server.address, key=server.key, timeout_s=1.0)
    with client, pytest.raises(CommTimeout, match="Whether it made this update is not known"):
        client.update({"w": torch.ones(1)})


def test_another_server_in_the_same_place_is_not_mistaken_for_the_first():
    with shoal.ps.Server({"w": torch.zeros(1)}, key=KEY, address="tcp://127.0.0.1:*") as first:
        client = client_of(first)
    # Its connections have just ended, so the port may be taken for a moment.
    deadline, second = time.monotonic() + GUARD_S, None
    while second is None:
        try:
            second = shoal.ps.Server({"w": torch.zeros(1)}, key=KEY, address=first.address)
        except LaunchError:
            assert time.monotonic() < deadline
    with second, client:
        with pytest.raises(PeerLost, match="started anew"):
            client.update({"w": torch.ones(1)})
        assert second.version == 0


def test_off_loopback_it_works_encrypted():
    try:
        own_address = reply_address("tcp://192.0.2.1:9")
    except LaunchError:
        pytest.skip("this machine has no address besides loopback")
    with shoal.ps.Server({"w": torch.zeros(1)}, address=own_address) as server, client_of(server) as client:
        assert leaves_host(server.address) and leaves_host(client._line.wire.address)
        assert client.update({"w": torch.ones(1)}) == 1


def test_a_client_serves_one_thread():
    with shoal.ps.Server({"w": torch.zeros(1)}) as server, client_of(server) as client:
        client._busy.acquire()  # as another thread does while it waits
        with pytest.raises(SpecError, match="make one for each"):
            client.get()
        client._busy.release()
        assert client.get()["w"].item() == 0.0
    with pytest.raises(SpecError, match="closed"):
        client.get()


def test_clients_come_and_go():
    with pytest.raises(SpecError, match="at most 128"):
        shoal.ps.Server({"w": torch.zeros(1)}, max_clients=129)
    with shoal.ps.Server({"w": torch.zeros(1)}, max_clients=3) as server:
        for count in range(1, 13):
            with client_of(server, patience_s=0.05) as client:
                assert client.update({"w": torch.ones(1)}) == count


@pytest.mark.parametrize("ending", ["stop", "ctrl-c"])
def test_a_server_runs_in_the_callers_thread(ending):
    server = shoal.ps.Server({"w": torch.zeros(1)})

    def use() -> None:
        with client_of(server) as client:
            assert client.update({"w": torch.ones(1)}) == 1
        if ending == "stop":
            server.stop()
        else:
            os.kill(os.getpid(), signal.SIGINT)

    with in_thread(use):
        server.run()
    assert server.version == 1
    with pytest.raises(SpecError, match="make a new one"):
        server.start()


@pytest.mark.parametrize("via", ["tcp", "ipc"])
def test_a_server_that_never_ran_gives_its_address_back(via):
    server = shoal.ps.Server({"w": torch.zeros(1)}, address=any_address(via))
    with pytest.raises(LaunchError, match="another process uses it"):
        shoal.ps.Server({"w": torch.zeros(1)}, address=server.address)
    server.stop()
    shoal.ps.Server({"w": torch.zeros(1)}, address=server.address).stop()


def test_a_server_is_by_default_where_only_its_user_can_reach_it_and_leaves_nothing():
    with shoal.ps.Server({"w": torch.zeros(1)}) as server, client_of(server) as client:
        file = Path(server.address.removeprefix("ipc://"))
        assert file.is_socket() and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert client.update({"w": torch.ones(1)}) == 1
        assert len(list(file.parent.iterdir())) == 2
    assert not file.parent.exists()


def long_names(each_bytes: int) -> dict[str, torch.Tensor]:
    return {f"{number:04}" + "n" * (each_bytes - 4): torch.ones(1) for number in range(4000)}


def test_names_as_long_as_they_may_be_travel_in_every_message() -> None:
    values = long_names(MOST_NAME_BYTES // 4000)
    with shoal.ps.Server(values) as server, client_of(server, compress="int8") as client:
        assert client.names == tuple(values)
        assert client.update(values) == 1
        assert all(value.item() == 2.0 for value in client.get(*values).values())


def test_names_that_are_too_long_to_be_told_are_refused_and_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="4000 parameters may have 2097152 bytes together, found 8000000"):
        shoal.ps.Server(long_names(2000))
    monkeypatch.setattr(table, "MOST_NAME_BYTES", 1 << 30)
    with shoal.ps.Server(long_names(2000)) as server:
        for _ in range(2):
            with pytest.raises(SpecError, match="header of message 'done' may have"):
                client_of(server)
