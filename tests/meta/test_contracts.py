"""Every contract that the architecture lists has a suite of tests over its implementations."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUITES = {
    "StrategySpec": "test_strategy_specs.py",
    "Strategy": "test_strategies.py",
    "Handover": "test_handover.py",
    "Compute": "test_compute.py",
    "Swap": "test_swaps.py",
    "Line": "test_mesh_parts.py",
    "Sharding": "test_mesh_parts.py",
    "Engine": "test_process_hosts.py",
    "Transport": "test_transport.py",
    "Group": "test_group.py",
    "Collective": "test_collectives.py",
    "Compression": "test_compressions.py",
    "EpochOrder": "test_epoch_orders.py",
    "Machine": "test_ps_machines.py",
    "ShardValues": "test_shard_values.py",
    "DurableStore": "test_durable_store.py",
    "Contribute": "test_contributions.py",
    "Succession": "test_successions.py",
    "Sink": "test_sinks.py",
    "Logger": "test_loggers.py",
    "Output": "test_outputs.py",
}


def test_every_contract_has_its_suite() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.split("## Contracts")[1].split("\n## ")[0]
    listed = set(re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE))
    assert listed == set(SUITES)
    for suite in SUITES.values():
        assert (ROOT / "tests" / "contract" / suite).is_file(), suite
