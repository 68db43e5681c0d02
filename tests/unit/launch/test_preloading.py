"""What a zygote imports for a job, so that its children need not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.launch.preloading import modules_for
from shoal.spec import Cluster, Job, World

CODE = """
import sys
from shoal.launch.preloading import preload
preload(["shoal.roles.server", "shoal.no_such_module", "antigravity"])
assert "shoal.roles.server" in sys.modules
assert "antigravity" not in sys.modules
"""


def modules(strategy: str, role: str, purpose: str = "train") -> list[str]:
    job = Job(target="task.py", purpose=purpose, strategy=strategy, cluster=Cluster(workers=2))
    return modules_for(job, World(role=role))


@pytest.mark.parametrize("role", ["coordinator", "server", "worker"])
def test_the_first_process_of_a_served_job_brings_what_the_others_need(role: str) -> None:
    found = modules("ps:servers=2", role)
    assert "shoal.strategies.ps.strategy" in found
    assert [name for name in found if name.startswith("shoal.roles")] == (
        [] if role == "worker" else [f"shoal.roles.{role}"]
    )


def test_scripts_need_nothing_unless_they_have_servers() -> None:
    assert modules("data", "worker", "script") == []
    assert "shoal.roles.server" in modules("ps", "server", "script")


def test_only_what_is_ours_and_is_there_is_imported() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
