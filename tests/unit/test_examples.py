"""The examples: each builds its task, and its model learns from one batch; scripts run from start to end."""

import importlib.util
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

import shoal
from helpers.scripts import run_as_main

EXAMPLES = Path(__file__).parents[2] / "examples"
PARAMETERS = {
    "branches": 36_090,
    "classification_servers": 1_002,
    "contrastive": 16_704,
    "digits": 19_210,
    "digits_conv": 24_058,
    "gpt": 842_496,
    "resnet": 23_520_842,
}
SCRIPTS = {"cross_validation", "factorisation_machine", "horovod_digits", "parameter_server_objects"}
OF_KERAS = {"keras_two_heads"}
"""Tested in keras/test_keras_models.py: their losses have names."""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_batch(task: shoal.Task, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return next(iter(DataLoader(task.dataset("train"), batch_size=size)))


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PARAMETERS) | SCRIPTS | OF_KERAS


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_of_the_example_lowers_its_loss(name):
    task = load(name).task()
    assert isinstance(task, shoal.Task)
    torch.manual_seed(task.seed)
    model = task.model()
    params = list(model.parameters())
    assert sum(param.numel() for param in params) == PARAMETERS[name]
    optimizer = task.optimizer(params)
    # Dropout would make the two losses incomparable.
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs, target = first_batch(task)
    before = task.loss(model(inputs), target)
    assert math.isfinite(before.item())
    before.backward()
    assert all(param.grad is not None for param in params)
    optimizer.step()
    assert task.loss(model(inputs), target).item() < before.item()
    assert all(0 <= metric(model(inputs), target) <= 1 for metric in task.metrics.values())


def test_factories_take_arguments():
    model = load("digits").task(width=8).model()
    assert model[0].out_features == 8
    assert len(load("gpt").task(depth=2, width=32).model().blocks) == 2


def test_resnet_has_fifty_layers_and_images_by_number():
    example = load("resnet")
    task = example.task()
    layers = [layer for layer in task.model().modules() if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear))]
    shortcuts = 4  # which the paper does not count
    assert len(layers) == 50 + shortcuts
    train, test = task.dataset("train"), task.dataset("test")
    assert torch.equal(train[7][0], train[7][0]) and not torch.equal(train[7][0], test[7][0])
    assert train[7][0].shape == (3, 32, 32) and {label for _, label in (train[n] for n in range(99))} == set(
        range(10)
    )
    assert len(example.task(width=4, depths="1-1-1-1").model()) < len(task.model())


def test_gpt_sees_only_the_past():
    task = load("gpt").task(width=32, depth=2)
    model = task.model().eval()
    tokens, _ = first_batch(task, 1)
    changed = tokens.clone()
    changed[0, 64:] = (changed[0, 64:] + 1) % 256
    with torch.no_grad():
        scores, others = model(tokens), model(changed)
    torch.testing.assert_close(scores[:, :64], others[:, :64])
    assert not torch.allclose(scores[:, 64:], others[:, 64:])


def test_gpt_decays_matrices_only_and_follows_the_cosine():
    task = load("gpt").task(width=32, depth=2, steps=100, lr=1.0)
    optimizer = task.optimizer(list(task.model().parameters()))
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] > 0 and {param.dim() for param in decayed["params"]} == {2}
    assert kept["weight_decay"] == 0 and {param.dim() for param in kept["params"]} == {1}
    scheduler = task.scheduler(optimizer)
    rates = []
    for _ in range(100):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.2) and max(rates) == pytest.approx(1.0)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert scheduler.get_last_lr()[0] == pytest.approx(0.1)


def test_the_plain_parameter_server_trains_digits(tmp_path, zygote):
    output = run_as_main(EXAMPLES / "parameter_server_objects.py", folder=tmp_path, zygote=zygote)
    assert output.returncode == 0, output.stderr
    assert len(re.findall(r"worker [01]: 200 updates sent", output.stdout)) == 2
    found = re.search(r"server: 400 updates applied, test accuracy (0\.\d+)", output.stdout)
    assert found is not None and float(found[1]) > 0.9
