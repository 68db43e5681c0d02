"""Flower's own simulation of FedAvg, on Ray, started by `federated.py` in an interpreter that has flwr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks.tensorflow_peer import die_with, keep_to_loopback

DATA_VARIABLE = "SHOAL_BENCH_FLOWER_DATA"
"""Names the file of what is trained on: its processes inherit it."""


def main(argv: Sequence[str]) -> None:
    """Simulate; what it came to is the last line that is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--processes", type=int, required=True, help="that simulate them")
    arguments = parser.parse_args(argv)
    die_with(os.getppid())
    keep_to_loopback()
    from flwr.simulation import run_simulation

    from benchmarks.flower_app import client_app, server_app

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=arguments.clients,
        backend_config={
            # One core each, as our workers have; without this Ray gives every client two.
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": arguments.processes, "include_dashboard": False, "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
