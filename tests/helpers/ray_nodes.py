"""A Ray cluster of this machine, whose nodes a test adds and removes. One process owns it: nothing of Ray's is
imported into the tests' own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

GUARD_S = 120.0


class RayNodes:
    """A head and other nodes, each at a loopback address of its own. `env` is for whoever uses the cluster."""

    def __init__(self, *, dashboard: bool = False, nodes: int = 2) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")  # Sockets want short paths.
        token = Path(self._folder.name) / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # Tests beside these would have all of the machine.
            "RAY_TMPDIR": self._folder.name,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # Jobs run what is called python.
        }
        wanted = {"dashboard": dashboard, "nodes": nodes}
        self._errors = open(Path(self._folder.name) / "errors", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **self.env},
            start_new_session=True,
        )
        try:
            begun = self._answer()
        except BaseException:
            self.close()
            raise
        self.address: str = begun["address"]
        self.dashboard: str = begun["dashboard"]

    def add(self, number: int) -> None:
        """A node at 127.0.0.NUMBER."""
        self._ask("add", number)

    def remove(self, number: int) -> None:
        """As if the power of the node at 127.0.0.NUMBER failed."""
        self._ask("remove", number)

    def close(self) -> None:
        with suppress(psutil.NoSuchProcess):
            those = [
                psutil.Process(self._process.pid),
                *psutil.Process(self._process.pid).children(recursive=True),
            ]
            with suppress(BrokenPipeError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            for one in those:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self._process.wait()
        self._errors.close()
        self._folder.cleanup()

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, what: str, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, number]).encode() + b"\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"Ray did not start: {Path(self._errors.name).read_text()[-2000:]}")


class GrowingRay:
    """A head of one CPU with Ray's autoscaler, which may add another node of one. `env` is for whoever uses it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp")
        folder = Path(self._folder.name)
        port = _free_port()
        self.address = f"127.0.0.2:{port}"
        self.env = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_TMPDIR": str(folder)}
        kinds = {"ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}}
        kinds["worker"] = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 1}
        wanted = {
            "cluster_name": "growing",
            "max_workers": 1,
            "idle_timeout_minutes": 1,
            "provider": {
                "type": "fake_multinode",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "use_node_id_as_ip": True,
                "gcs_address": self.address,
            },
            "available_node_types": kinds,
            "head_node_type": "ray.head.default",
            "auth": {},
            "docker": {},
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            "file_mounts": {},
            "cluster_synced_files": [],
            "file_mounts_sync_continuously": False,
            "rsync_exclude": [],
            "rsync_filter": [],
            "upscaling_speed": 1.0,
        }
        config = folder / "autoscaling.json"
        config.write_text(json.dumps(wanted))
        words = ["start", "--head", "--block", "--node-ip-address=127.0.0.2", f"--port={port}", "--num-cpus=1"]
        words += [f"--autoscaling-config={config}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
        # Not Ray's own ports, which another cluster of this machine may have.
        for what in ("dashboard-agent-listen", "dashboard", "ray-client-server"):
            words.append(f"--{what}-port={_free_port()}")
        self._log = open(folder / "log", "wb")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **self.env, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"},
            start_new_session=True,
        )
        deadline = time.monotonic() + GUARD_S
        while "Ray runtime started" not in (folder / "log").read_text():
            assert time.monotonic() < deadline and self._process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)

    def __enter__(self) -> GrowingRay:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: Any, trace: TracebackType | None) -> None:
        started = psutil.Process(self._process.pid)
        for one in [*started.children(recursive=True), started]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()


@contextmanager
def client_server(nodes: RayNodes) -> Iterator[str]:
    """Where Ray's client is served for this cluster: `ray://…`."""
    port = _free_port()
    command = [sys.executable, "-m", "ray.util.client.server", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(
        [*command, "--address", nodes.address, "--mode", "proxy"],
        env={**os.environ, **nodes.env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        served = psutil.Process(server.pid)
        try:
            _wait_for_port(port)
            yield f"ray://127.0.0.1:{port}"
        finally:
            for one in [*served.children(recursive=True), served]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + GUARD_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "nothing listens"
            time.sleep(0.1)


def own_cluster() -> None:
    """What the process does: a cluster until its standard input ends."""
    from ray.cluster_utils import Cluster

    wanted = json.loads(sys.argv[1])
    # Whatever is written by others goes elsewhere.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 2, "include_dashboard": wanted["dashboard"]}
    # Not Ray's own, which another cluster of this machine may have.
    head |= {"dashboard_port": 0, "dashboard_agent_listen_port": 0}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = {}

    def add(number: int) -> None:
        nodes[number] = cluster.add_node(
            wait=False,
            node_ip_address=f"127.0.0.{number}",
            num_cpus=2,
            resources={"special": 1},
            dashboard_agent_listen_port=0,
        )

    for number in range(3, wanted["nodes"] + 2):
        add(number)
    where = cluster.head_node.address_info.get("webui_url") or ""
    print(json.dumps({"address": cluster.address, "dashboard": f"http://{where}"}), file=out)
    for line in sys.stdin:
        what, number = json.loads(line)
        if what == "add":
            add(number)
        else:
            node = nodes.pop(number)
            processes = [info.process for infos in node.all_processes.values() for info in infos]
            for process in processes:
                process.send_signal(signal.SIGKILL)
            cluster.remove_node(node, allow_graceful=False)
        cluster.wait_for_nodes(GUARD_S)
        print(json.dumps({}), file=out)
    cluster.shutdown()


if __name__ == "__main__":
    own_cluster()
