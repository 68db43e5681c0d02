"""TensorFlow's peer, as far as it goes without TensorFlow: command, environment, arithmetic and end."""

import ast
import io
import itertools
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import environment
from benchmarks import tensorflow_peer as peer
from benchmarks.compare import compare
from benchmarks.environment import TENSORFLOW
from benchmarks.fresh import surroundings
from benchmarks.measurement import Measurement
from benchmarks.models import CYCLE, WORKLOADS, warm_up_steps
from benchmarks.session import Session
from benchmarks.variants import TENSORFLOW_OPTIONS, VARIANTS
from shoal.errors import LaunchError, SpecError

SCRIPT = Path(peer.__file__)


@pytest.fixture
def no_environment(monkeypatch, tmp_path):
    """A machine on which nobody has installed TensorFlow for the benchmark."""
    monkeypatch.delenv(TENSORFLOW.variable, raising=False)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return TENSORFLOW.folder


def test_its_workload_is_the_benchmarks_own():
    workload = WORKLOADS["mlp"]()
    shapes = [tuple(layer.weight.T.shape) for layer in workload.model() if isinstance(layer, torch.nn.Linear)]
    assert shapes == list(itertools.pairwise(peer.WIDTHS))
    group = workload.optimizer(workload.model().parameters()).param_groups[0]
    assert (group["lr"], group["momentum"]) == (peer.LEARNING_RATE, peer.MOMENTUM)
    assert (workload.batch_per_process, workload.steps) == (peer.BATCH, peer.STEPS)
    assert peer.BATCHES_PER_PROCESS == CYCLE
    assert [peer.warm_up_steps(steps) for steps in (1, 40, 200)] == [warm_up_steps(n) for n in (1, 40, 200)]


def test_it_imports_nothing_that_its_interpreter_lacks():
    modules = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"numpy", "tensorflow"}


@pytest.mark.parametrize("variant", TENSORFLOW_OPTIONS)
def test_its_command_runs_the_script_with_the_named_interpreter(variant, monkeypatch):
    monkeypatch.setenv(TENSORFLOW.variable, sys.executable)
    python, safe_path, script, *rest = VARIANTS[variant]("mlp", 3, 7)
    assert [python, safe_path, Path(script)] == [sys.executable, "-P", SCRIPT]
    asked = peer.parse(rest)
    assert (asked.name, asked.processes, asked.steps) == (variant, 3, 7)
    assert asked.servers == (2 if variant.endswith("_2") else 1) and asked.tuned == variant.endswith("_tuned")
    assert peer.parse(VARIANTS[variant]("mlp", 2, None)[3:]).steps == peer.STEPS


def test_another_model_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setenv(TENSORFLOW.variable, sys.executable)
    told = []
    with pytest.raises(SpecError, match="written for the model 'mlp', found 'gpt'"):
        compare("gpt", ["ddp", "tensorflow_ps"], on_measured=told.append)
    assert told == []


def test_without_its_environment_the_variant_says_how_to_get_it(no_environment):
    with pytest.raises(LaunchError, match="make bench-peers"):
        VARIANTS["tensorflow_ps"]("mlp", 2, None)


def test_without_its_environment_the_benchmark_leaves_it_out_with_one_line(no_environment):
    console = Console(width=200, file=io.StringIO(), record=True)
    assert Session(console)._tensorflow_variants() == []
    (line,) = console.export_text().splitlines()
    assert "left out" in line and "make bench-peers" in line and TENSORFLOW.variable in line


def test_half_an_environment_is_none(no_environment):
    (no_environment / "bin").mkdir(parents=True)
    (no_environment / "bin" / "python").touch()
    assert TENSORFLOW.python() is None
    (no_environment / environment.MARKER).touch()
    assert TENSORFLOW.python() == no_environment / "bin" / "python"


def test_a_wrong_interpreter_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(TENSORFLOW.variable, str(tmp_path))
    with pytest.raises(SpecError, match="no program that can be run"):
        TENSORFLOW.python()


def test_a_failed_installation_is_an_error(no_environment):
    no_environment.write_text("a file where the folder should be")
    with pytest.raises(LaunchError, match=r"-m venv .* failed with status"):
        TENSORFLOW.make()


def test_the_report_is_a_measurement_of_all_samples_over_the_wall_time():
    # Two workers, one of them three times as fast: four steps in each second, after a slow warm-up.
    warm_up = [(float(when), 7.0) for when in (-30, -20, -10, 0)]
    measured = [
        (when, 6.0) for second in range(3) for when in (second + 0.3, second + 0.6, second + 0.9, second + 1)
    ]
    found = Measurement.from_output(json.dumps(peer.report("tensorflow_ps", 2, 6, [*warm_up, *measured])))
    assert found.samples_per_s == pytest.approx(4 * peer.BATCH)
    assert found.step_s == pytest.approx(0.5) and found.loss == 6.0
    assert found.processes == 2 and 0 < found.spread < 1


def test_each_process_has_an_address_of_its_own():
    cluster = peer.free_addresses(2, 3)
    assert [len(cluster[job]) for job in ("ps", "worker")] == [2, 3]
    addresses = cluster["ps"] + cluster["worker"]
    assert len(set(addresses)) == 5 and all(address.startswith("127.0.0.1:") for address in addresses)


def test_a_process_ends_with_the_one_that_started_it():
    code = (
        "import functools, os, subprocess, sys\n"
        "from benchmarks.tensorflow_peer import die_with\n"
        "follow = functools.partial(die_with, os.getpid())\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(100)'], preexec_fn=follow)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=surroundings(), stdout=subprocess.PIPE, text=True) as parent:
        child = os.pidfd_open(int(parent.stdout.readline()))
        alive, _, _ = select.select([child], [], [], 0)
        parent.kill()
        ended, _, _ = select.select([child], [], [], 60)
        os.close(child)
    assert alive == [] and ended == [child]
