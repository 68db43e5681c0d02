"""A key-value store in real processes: workers that share servers, and servers that are killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.etcd import free_ports
from helpers.forked import in_processes
from helpers.kv_servers import ServerThreads
from helpers.scripts import run_as_main
from shoal import kv
from shoal.comm.codec import Message, encode
from shoal.comm.security import RunKey
from shoal.comm.zmq_wire import ZmqWire
from shoal.coordinator.store import MemoryStore, StoreError
from shoal.errors import CommTimeout, LaunchError, SpecError
from shoal.kv import lines
from shoal.kv.holders import Holders
from shoal.kv.lines import ShardLine
from shoal.kv.pushes import PushQueue
from shoal.kv.register import open_register
from shoal.kv.requests import KvRequest
from shoal.launch.scripts import run_script
from shoal.ps.plain.messages import write_request
from shoal.spec import Cluster, World

ROOT = Path(__file__).parents[2]


def test_a_local_store_has_keys_lists_and_optimizers():
    with kv.create("local") as store:
        assert (store.rank, store.num_workers, store.type) == (0, 1, "local")
        store.init(3, torch.ones(2, 3))
        store.push(3, torch.full((2, 3), 8.0))
        assert store.pull(3).tolist() == [[8] * 3] * 2
        store.push(3, [torch.ones(2, 3)] * 4)
        out = torch.empty(2, 3)
        store.pull(3, out=out)
        assert out.tolist() == [[4] * 3] * 2
        copies = [torch.empty(2, 3), torch.empty(2, 3)]
        store.pull(3, out=copies)
        assert all(torch.equal(copy, out) for copy in copies)
        store.init("none", torch.zeros(0, 3))
        assert store.pushpull("none", torch.zeros(0, 3)).shape == (0, 3)
        store.init(["a", "b"], [torch.zeros(()), torch.zeros(4, dtype=torch.float64)])
        store.set_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.5))
        first, second = store.pushpull(["a", "b"], [torch.tensor(1.0), torch.ones(4, dtype=torch.float64)])
        assert first.tolist() == -0.5 and second.tolist() == [-0.5] * 4
        store.push(3, torch.sparse_coo_tensor([[1, 1]], [[1.0] * 3] * 2, (2, 3)))
        assert store.pull(3).tolist() == [[4] * 3, [3] * 3]
        store.set_gradient_compression("bf16")
        store.push("a", torch.tensor(1.0 + 2**-12))
        assert float(store.pull("a")) == -1
        for act, sentence in [
            (lambda: store.push("c", torch.zeros(1)), "'c' is not known"),
            (lambda: store.push("b", torch.zeros(5)), "has the shape"),
            (lambda: store.push("a", 1.0), "a value is a tensor of torch's, found float"),
            (lambda: store.init("a", torch.zeros(2)), r"is \[\] of torch.float32 here, found \[2\]"),
            (lambda: store.push(3, torch.ones(2, 3).to_sparse()), r"to_sparse\(1\)"),
            (lambda: store.row_sparse_push(3, [2], torch.zeros(1, 3)), "has the rows 0 to 1, found 2"),
            (lambda: store.row_sparse_push(3, [0, 1], torch.zeros(1, 3)), r"shape \[2, 3\], found \[1, 3\]"),
            (lambda: store.row_sparse_pull(3, torch.tensor([0, -1])), "has the rows 0 to 1, found -1"),
            (lambda: store.row_sparse_pull(3, torch.tensor([0.0])), "whole numbers, found torch.float32"),
            (lambda: store.pull(["a", "b"], out=torch.zeros(4)), "2 keys need as many tensors in out=, found 1"),
            (lambda: store.set_gradient_compression({"type": "int8", "threshold": 0.5}), "'threshold' beside it"),
            (lambda: kv.create("dist_often"), "kind of store"),
            (lambda: kv.create("dist_async", servers="tcp://127.0.0.1:1"), "need their key"),
            (lambda: kv.create("dist_async", key="kv.key"), "leave it out"),
            (lambda: store.set_gradient_compression({"type": "2bit", "threshold": 0.5}), "`sign` is nearest"),
        ]:
            with pytest.raises(SpecError, match=sentence):
                act()


def test_a_store_over_the_wire_is_that_of_one_process():
    """Two servers, as threads here: processes of their own take their time to start."""
    with ServerThreads(2) as servers, servers.store(through_memory=False) as store, kv.create("local") as peer:
        for one in (store, peer):
            one.init(["table", "small"], [torch.zeros(5000, 64), torch.ones(3)])
            one.set_optimizer("sgd", lr=1.0, momentum=0.5)
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                numbers = torch.randint(0, 5000, (300,), generator=generator)
                one.row_sparse_push("table", numbers, torch.randn(300, 64, generator=generator))
                one.push("small", torch.full((3,), float(step)))
            one.push("table", torch.full((5000, 64), 0.25))
        for name in ("table", "small"):
            assert torch.equal(store.pull(name), peer.pull(name))
        some = torch.tensor([4999, 0, 2500, 0])
        assert torch.equal(store.row_sparse_pull("table", some), peer.pull("table")[some])


@pytest.mark.parametrize("how", ["bf16", "int8", "sign", "topk:0.25", "powersgd:2", "zstd"])
def test_what_a_compression_rounds_off_is_part_of_the_next_push(how):
    given = torch.randn(40, 8, generator=torch.Generator().manual_seed(1)).double()
    with kv.create("local") as store:
        store.init(["whole", "rows"], [torch.zeros(40, 8).double()] * 2)
        store.set_optimizer("sgd", lr=1.0)
        store.set_gradient_compression({"type": how})
        for _ in range(100):
            store.push("whole", given)
        assert float((store.pull("whole") / -100 - given).norm() / given.norm()) < 0.1
        store.row_sparse_push("rows", torch.arange(40), given)
        tolerance = {"bf16": 0.02, "int8": 0.02}.get(how, 1e-12)
        assert float((store.pull("rows") + given).norm() / given.norm()) < tolerance


def test_of_pushes_that_wait_the_higher_priority_goes_first():
    sent, begun, go = [], threading.Event(), threading.Event()
    queue = PushQueue()

    def hold() -> None:
        begun.set()
        go.wait()

    queue.add("held", 0, hold)
    begun.wait()
    wanted = [("a", -2), ("b", -1), ("b", 9), ("c", 0), ("d", -1)]
    futures = [queue.add(key, priority, partial(sent.append, (key, priority))) for key, priority in wanted]
    go.set()
    for future in futures:
        future.result()
    queue.close()
    assert sent == [("c", 0), ("b", -1), ("d", -1), ("a", -2), ("b", 9)], (
        "a key's second push is not before others' first"
    )


def check_rows(world: World, kind: str, servers: int, kills: int, *, through_memory: bool) -> Any:
    """All workers push to random rows, and what comes of it is what a dense table would be."""
    if not through_memory:
        lines._shared = lambda told: None
    store = kv.create(kind, servers=servers, world=world)
    rows, steps = 5000, 12
    store.init("table", torch.zeros(rows, 64))
    store.set_optimizer("sgd", lr=1.0)
    store.init(f"later {0}", torch.zeros(3))  # a key that appears later
    expected = torch.zeros(rows, 64)
    for step in range(steps):
        for worker in range(world.world_size):
            generator = torch.Generator().manual_seed(100 * step + worker)
            numbers = torch.randint(0, rows, (300,), generator=generator)
            values = torch.randint(-3, 4, (300, 64), generator=generator).float()
            expected.index_add_(0, numbers, -values)
            if worker == store.rank:
                stamp = store.row_sparse_push("table", numbers, values)
        if store.servers is not None and step in range(2, 2 + 2 * kills, 2):
            os.kill(store.servers.pids[step // 2 % servers], signal.SIGKILL)
        store.wait(stamp)
    store.barrier()
    assert torch.equal(store.pull("table"), expected)
    some = torch.tensor([4999, 0, 7, 0])
    assert torch.equal(store.row_sparse_pull("table", some), expected[some])
    deadline = time.monotonic() + 30
    while store.servers is not None and store.servers.restarts < kills and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.servers is None or store.servers.restarts == kills
    store.close()


def test_the_pages_example_runs(tmp_path, zygote):
    page = (ROOT / "docs" / "kv.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(block)
    answer = run_as_main(script, folder=tmp_path, zygote=zygote)
    assert answer.stdout == "[-0.5, -0.5, -0.5, -0.5]\n", answer.stderr


@pytest.mark.long
def test_the_factorisation_machine_learns(tmp_path, warm_commands):
    said = warm_commands(
        tmp_path, "run", "-n", "2", "--servers", "1", str(ROOT / "examples" / "factorisation_machine.py")
    )
    assert said.status == 0, said.text
    losses = [float(line.split()[-1]) for line in said.out.splitlines() if line.startswith("[0]")]
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "servers", "kills", "through_memory"),
    [
        ("dist_async", 2, 1, True),
        ("dist_async", 2, 1, False),
        ("dist_sync", 1, 2, False),
        ("dist_sync", 1, 0, True),
        ("dist_ssp:2", 2, 2, False),
        ("dist_ssp:2", 2, 0, True),
    ],
)
def test_no_acknowledged_push_is_lost_with_a_server(kind, servers, kills, through_memory):
    in_processes(2, lambda world: check_rows(world, kind, servers, kills, through_memory=through_memory))


@pytest.mark.parametrize("kind", ["dist_async", pytest.param("dist_sync", marks=pytest.mark.long)])
def test_a_backup_takes_over_from_a_server_whose_memory_is_gone(kind):
    """Each of three servers dies once, in the middle of pushes, and comes back with nothing."""
    with ServerThreads(3, copies=True) as servers, servers.store(kind) as store:
        rows, expected = 6000, torch.zeros(6000, 64)
        store.init("table", expected)
        store.set_optimizer("sgd", lr=1.0)
        for step in range(12):
            generator = torch.Generator().manual_seed(step)
            numbers = torch.randint(0, rows, (300,), generator=generator)
            values = torch.randint(-3, 4, (300, 64), generator=generator).float()
            expected.index_add_(0, numbers, -values)
            store.row_sparse_push("table", numbers, values)
            if step % 4 == 3:
                servers.kill(step // 4)
                store.wait()
                servers.start(step // 4)
                servers.wait_for_copies()
        assert torch.equal(store.pull("table"), expected)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_more_rows_than_fit_a_message_are_pushed_and_pulled(num_servers):
    with ServerThreads(num_servers) as servers, servers.store("dist_sync", through_memory=False) as store:
        rows = torch.arange(300_000).flip(0)  # 73 MiB, which no frame has
        store.init("table", torch.zeros(300_000, 64))
        store.set_optimizer("sgd", lr=1.0)
        for _ in range(2):
            store.row_sparse_push("table", rows, rows[:, None].float().expand(-1, 64))
        assert torch.equal(store.row_sparse_pull("table", rows), -2.0 * rows[:, None].expand(-1, 64))


def test_what_one_client_sends_ends_no_server():
    """More than fits an answer, an address that cannot be reached, and what is no request at all."""
    with ServerThreads(1) as servers, servers.store(through_memory=False) as store:
        store.init("table", torch.ones(300_000, 64))  # 73 MiB, which no frame has
        line = ShardLine(0, servers.addresses, servers.key, 60.0, through_memory=False)
        with pytest.raises(SpecError, match="A frame may have"):
            line.ask(KvRequest(ask="pull", key="table", count=300_000))
        line.close()
        asked = KvRequest(ask="hello", client=bytes(16), sequence=1)
        messages = [write_request(asked, address) for address in ("tcp://nowhere", "ipc://here", "", "x" * 200)]
        with ZmqWire(f"{servers.addresses[0]}-stranger", key=servers.key) as wire:
            wire.connect(0, servers.addresses[0])
            for message in [*messages, Message("pull", {}), Message("kv ChangeMade", {"shard": 0})]:
                wire.transmit(0, encode(message))
            deadline = time.monotonic() + 60
            while servers.servers[0].refused < 6 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert servers.servers[0].refused == 6
        assert torch.equal(store.row_sparse_pull("table", [299_999]), torch.ones(1, 64))


def test_a_server_that_cannot_listen_says_so_and_is_not_started_again():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with kv.KvServers([address], RunKey.create()) as servers:
            with pytest.raises(LaunchError, match="another process uses it; choose another port"):
                servers.wait_until_listening()
            assert servers.restarts == 0
    with pytest.raises(SpecError, match=r"found '127.0.0.1:7000'; name each server as tcp://10.0.0.1:7000"):
        kv.KvServers(["127.0.0.1:7000"], RunKey.create())


def test_servers_that_cannot_agree_say_so(capfd):
    """Their store is down when they start, and a worker that gives up hears that servers were there."""
    sentence = r"within 5 s: what answers there speaks for nothing"
    with (
        ServerThreads(2, copies=True, register=Unreachable()) as servers,
        pytest.raises(CommTimeout, match=sentence),
    ):
        ShardLine(0, servers.addresses, servers.key, 5.0)
    assert "who holds what: the store is down. It is tried again." in capfd.readouterr().err
    with pytest.raises(SpecError, match=r"found '127\.0\.0\.1:9'"):
        kv.create("dist_async", servers=["tcp://127.0.0.1:8", "127.0.0.1:9"], key=RunKey.create(), world=World())


class Unreachable(MemoryStore):
    def load(self):
        raise StoreError("the store is down.")


def wait_until_filled(register: Path, num_shards: int) -> None:
    """Until there is a second copy of every shard."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        _, state = open_register(str(register)).load()
        if (
            sum(Holders.from_plain(one).filled for one in (state or {"shards": {}})["shards"].values())
            == num_shards
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"no copies: {state}")


@pytest.mark.long
def test_servers_of_their_own_outlive_one_that_is_killed_with_its_memory(tmp_path):
    """`shoal kv serve` twice, over tcp, as on two hosts; all processes of one are killed, and it comes again."""
    addresses = ",".join(f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    given = ["--at", addresses, "--key", "kv.key", "--store", "register", "--dead-after", "1"]

    def start(number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shoal.cli", "kv", "serve", *given, "--number", str(number)]
        server = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True)
        assert b"with a copy" in server.stdout.readline()
        return server

    servers = [start(0), start(1)]
    try:
        expected = torch.zeros(9000, 64)
        with kv.create("dist_async", servers=addresses, key=tmp_path / "kv.key") as store:
            store.init("table", expected)
            store.set_optimizer("sgd", lr=1.0)
            for step in range(30):
                numbers = torch.randint(0, 9000, (500,), generator=torch.Generator().manual_seed(step))
                expected.index_add_(0, numbers, torch.full((500, 64), -1.0))
                store.row_sparse_push("table", numbers, torch.ones(500, 64))
                if step == 10:
                    os.killpg(servers[0].pid, signal.SIGKILL)
                if step == 20:
                    store.wait()
                    servers[0].wait()
                    servers[0] = start(0)
            assert torch.equal(store.pull("table"), expected)
        wait_until_filled(tmp_path / "register", num_shards=2)
        # What was pushed is there, and stays as it is.
        with kv.create("dist_async", servers=addresses, key=tmp_path / "kv.key") as store:
            store.init("table", torch.zeros(9000, 64))
            os.killpg(servers[1].pid, signal.SIGKILL)
            assert torch.equal(store.pull("table"), expected)
    finally:
        for server in servers:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
            server.stdout.close()


def test_a_store_beside_a_strategy_that_has_servers_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("")
    with pytest.raises(SpecError, match="give one of the two"):
        run_script(script, cluster=Cluster(workers=1), strategy="ps", variables={"SHOAL_KV_SERVERS": "x y"})
