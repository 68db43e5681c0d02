"""The example of ten workers and a server, as a user starts it, beside the same algorithm in a plain loop."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.commands import environment

SCRIPT = Path(__file__).parents[2] / "examples" / "classification_servers.py"
GUARD_S = 180.0
EVALUATIONS = list(range(10, 101, 10))


def averaged_by_hand(task, *, workers, rounds, every):
    """Local models, each on its own part; after `every` steps they become their mean. The losses, the model."""
    inputs, targets = task.dataset("train").tensors
    torch.manual_seed(task.seed)
    mean, losses = task.model(), []
    for _ in range(rounds):
        pushed = []
        for own_inputs, own_targets in zip(inputs.chunk(workers), targets.chunk(workers), strict=True):
            local = task.model()
            local.load_state_dict(mean.state_dict())
            optimizer = task.optimizer(list(local.parameters()))
            for _ in range(every):
                optimizer.zero_grad()
                task.loss(local(own_inputs), own_targets).backward()
                optimizer.step()
            pushed.append(local.state_dict())
        mean.load_state_dict({name: sum(state[name] for state in pushed) / workers for name in pushed[0]})
        with torch.no_grad():
            losses.append(task.loss(mean(inputs), targets).item())
    return losses, mean.state_dict()


def test_ten_workers_and_a_server_average_what_they_trained(tmp_path, zygote):
    done = subprocess.run(
        [sys.executable, SCRIPT],
        cwd=tmp_path,
        env=environment(zygote),
        capture_output=True,
        text=True,
        check=True,
        timeout=GUARD_S,
    )
    shown = re.findall(r"^step (\d+): test loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in shown] == EVALUATIONS
    assert re.search(r"^run time \d+\.\d s$", done.stdout, re.MULTILINE)
    stored = re.search(r"stored in (\S+), digest ([0-9a-f]{32})$", done.stdout, re.MULTILINE)
    assert stored is not None and done.stdout.count(stored[2]) == 2, "the digest of the run's table"

    example = runpy.run_path(str(SCRIPT))
    losses, expected = averaged_by_hand(
        example["task"](), workers=example["WORKERS"], rounds=len(EVALUATIONS), every=example["PUSH_EVERY"]
    )
    assert [float(loss) for _, loss in shown] == pytest.approx(losses, abs=2e-4)
    parameters = load_file(stored[1])
    assert parameters.keys() == expected.keys()
    for name, values in parameters.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


def test_it_stops_when_the_loss_moves_by_less_than_a_millionth():
    stop = runpy.run_path(str(SCRIPT))["task"]().stop
    assert stop.reached([0.5, 0.5 - 0.9e-6]) and not stop.reached([0.5, 0.5 - 1.1e-6])
