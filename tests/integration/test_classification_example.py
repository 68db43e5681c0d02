"""The example of ten workers and a server, as a user starts it, beside the same algorithm in a plain loop."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from helpers.scripts import run_as_main

SCRIPT = Path(__file__).parents[2] / "examples" / "classification_servers.py"
STAND_IN = """
from pathlib import Path
import numpy as np

def make_classification(**asked):
    made = np.load(Path(__file__).with_name("made.npz"))
    return made["features"], made["classes"]
"""
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


def stand_in(folder: Path, made: TensorDataset) -> Path:
    """Where workers find a scikit-learn that has made this already: each of ten would import the real one."""
    features, one_hot = made.tensors
    package = folder / "beside" / "sklearn"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "datasets.py").write_text(STAND_IN)
    np.savez(package / "made.npz", features=features.numpy(), classes=one_hot.argmax(1).numpy())
    return package.parent


def test_ten_workers_and_a_server_average_what_they_trained(tmp_path, zygote):
    example = runpy.run_path(str(SCRIPT))
    path = stand_in(tmp_path, example["samples"]())
    done = run_as_main(SCRIPT, folder=tmp_path, zygote=zygote, path=[path])
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^step (\d+): test loss ([\d.]+)", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in shown] == EVALUATIONS
    assert re.search(r"^run time \d+\.\d s$", done.stdout, re.MULTILINE)
    stored = re.search(r"stored in (\S+), digest ([0-9a-f]{32})$", done.stdout, re.MULTILINE)
    assert stored is not None and done.stdout.count(stored[2]) == 2, "the digest of the run's table"

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
