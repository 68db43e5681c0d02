"""A key-value store in real processes: workers that share servers, and servers that are killed."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.forked import in_processes
from helpers.scripts import run_as_main
from shoal import kv
from shoal.comm.security import RunKey
from shoal.comm.socket_folder import SocketFolder
from shoal.errors import SpecError
from shoal.kv.desk import KvDesk, StoreConsistency
from shoal.kv.lines import WireLine
from shoal.kv.serve import KvServer
from shoal.kv.vault import Vault, make_memory
from shoal.spec import World

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
            (lambda: store.row_sparse_push(3, torch.tensor([2]), torch.zeros(1, 3)), "below 2"),
            (lambda: kv.create("dist_often"), "kind of store"),
        ]:
            with pytest.raises(SpecError, match=sentence):
                act()


def test_a_store_over_the_wire_is_that_of_one_process():
    """Two servers, as threads here: processes of their own take their time to start."""
    key, over = RunKey.create(), threading.Event()
    with SocketFolder() as folder:
        memories = [make_memory() for _ in range(2)]
        servers = [
            KvServer(KvDesk(Vault(fd), StoreConsistency.parse("dist_async"), 1), f"ipc://{folder.path}/{fd}", key)
            for fd in memories
        ]

        def serve(server: KvServer) -> None:
            while not over.is_set():
                server.serve_once()
            server.close()

        threads = [threading.Thread(target=serve, args=(server,)) for server in servers]
        for thread in threads:
            thread.start()
        lines = [WireLine(f"ipc://{folder.path}/{fd}", key, 60.0) for fd in memories]
        with kv.KVStore("dist_async", lines, World(), None) as store, kv.create("local") as peer:
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
        over.set()
        for thread in threads:
            thread.join()
        for fd in memories:
            os.close(fd)


def check_rows(world: World, kind: str, servers: int, kills: int) -> Any:
    """All workers push to random rows, and what comes of it is what a dense table would be."""
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
    if store.servers is not None:
        assert store.servers.restarts == kills
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
    said = warm_commands(tmp_path, "run", "-n", "2", str(ROOT / "examples" / "factorisation_machine.py"))
    assert said.status == 0, said.text
    losses = [float(line.split()[-1]) for line in said.out.splitlines() if line.startswith("[0]")]
    assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(
    ("kind", "servers", "kills"),
    [
        pytest.param("dist_async", 2, 1, marks=pytest.mark.long),
        pytest.param("dist_sync", 1, 2, marks=pytest.mark.long),
        pytest.param("dist_ssp:2", 2, 2, marks=pytest.mark.long),
        pytest.param("dist_sync", 2, 0, marks=pytest.mark.long),
    ],
)
def test_no_acknowledged_push_is_lost_with_a_server(kind, servers, kills):
    in_processes(2, lambda world: check_rows(world, kind, servers, kills))
