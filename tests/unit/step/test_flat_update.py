"""Updates of flat shards: what plain steps come to, up to the order of rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal.errors import SpecError
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.spec import Cluster, Data, StepForm, Task, World
from shoal.step.compute import EagerCompute
from shoal.step.device_step import DeviceStep
from shoal.step.flat_rules import BOUND, FlatShard, kept_keys
from shoal.step.work import Work
from shoal.strategies.base import Company, Setting
from shoal.strategies.data.single import SingleProcess

Make = Callable[[list[torch.Tensor]], optim.Optimizer]
RULES: dict[str, Make] = {
    "AdamW": lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "Adam": lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1),
    "SGD": lambda params: optim.SGD(params, lr=0.1, weight_decay=0.1),
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", RULES)
def test_a_shard_follows_torchs_own_steps(rule: str, device: str) -> None:
    drawn = torch.Generator().manual_seed(3)
    start = torch.randn(5000, generator=drawn).to(device)
    expected = nn.Parameter(start.clone())
    plain = RULES[rule]([expected])
    group = plain.param_groups[0]
    keys = kept_keys(plain, group)
    shard = FlatShard(
        values=start.clone(),
        gradients=torch.zeros(5000, dtype=torch.bfloat16, device=device),
        state={key: torch.zeros(5000, device=device) for key in keys},
        steps=torch.zeros(3, device=device),
        factor=torch.ones(1, device=device),
    )
    for step in range(5):
        gradient = torch.randn(5000, generator=drawn).bfloat16().to(device)
        factor = 0.5 if step == 2 else 1.0
        before = expected.detach().clone()
        expected.grad = gradient.float() * factor
        plain.step()
        shard.gradients.copy_(gradient)
        shard.factor.fill_(factor)
        shard.update(plain, group)
        moved = (expected.detach() - before).norm()
        assert (shard.values - expected.detach()).norm() <= (step + 1) * BOUND * moved
    for key in keys:
        assert torch.allclose(shard.state[key], plain.state[expected][key], rtol=1e-5, atol=1e-7)
    assert shard.steps.tolist() == [5.0 if "Adam" in rule else 0.0] * 3


class Tied(nn.Module):
    """Linear layers, one of which shares its weight with the embedding, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.bare = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.bare(torch.relu(self.layer(self.words(words))))))


def trained(
    form: StepForm, make: Make, *, steps: int = 6, start: Start | None = None, batches: int = 1
) -> SingleProcess:
    torch.manual_seed(1)
    drawn = torch.Generator().manual_seed(3)
    words, target = (torch.randint(0, 16, (12,), generator=drawn) for _ in range(2))
    task = Task(
        model=Tied,
        loss=lambda scores, target: F.cross_entropy(scores.float(), target),
        optimizer=make,
        train=TensorDataset(words, target),
        batch_size=12,
        clip_norm=0.5,
        weight=lambda batch: float(len(batch[0])),
    )
    replica = Replica(task, precision="bf16", form=form, start=start)
    strategy = SingleProcess()
    quiet = Company(report=lambda text: None, warn=lambda text: None)
    setting = Setting(world=World(), conduct=Data().conduct(Cluster()), company=quiet, clip_norm=task.clip_norm)
    strategy.open(replica, setting)
    replica.train_mode()

    def load() -> Iterator[LoadedBatch]:
        for part in range(batches):
            rows = slice(12 * part // batches, 12 * (part + 1) // batches)
            yield (words[rows], target[rows]), 12 / batches, 12 // batches

    for step in range(1, steps + 1):
        strategy.take(Work(step, (Part(0, load, None),), 0)).result()
    return strategy


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("rule", ["AdamW", "momentum"])
def test_a_flat_update_trains_the_same(rule: str, batches: int) -> None:
    plain, found = (trained(StepForm(flat_update=flat), RULES[rule], batches=batches) for flat in (False, True))
    for name, param in plain._replica.trained.items():
        assert torch.allclose(found._replica.trained[name], param, rtol=1e-3, atol=1e-4), name
    before, after = plain.snapshot(), found.snapshot()
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[name].float(), before[name].float(), rtol=2e-2, atol=1e-4) for name in before)


def test_a_step_that_is_replayed_takes_no_factor_from_a_plain_one() -> None:
    """Plain steps divide by the weight of the batch; shares have done so before."""
    found = []
    for flat in (False, True):
        strategy = trained(StepForm(flat_update=flat), RULES["AdamW"], steps=2)
        strategy._update._clip_norm = None
        compute, params = strategy._compute, strategy._replica.trained
        assert isinstance(compute, EagerCompute)
        for param in params.values():
            param.grad = None
        batch = torch.arange(12) % 16, torch.arange(12) % 16
        DeviceStep(strategy._replica, compute, strategy._update).run([batch], [torch.tensor(1.0)], 3)
        found.append({name: param.detach().clone() for name, param in params.items()})
    assert all(torch.allclose(found[1][name], plain, rtol=1e-3, atol=1e-4) for name, plain in found[0].items())


def test_it_goes_on_from_what_was_saved() -> None:
    whole = trained(StepForm(flat_update=True), RULES["AdamW"])
    half = trained(StepForm(flat_update=True), RULES["AdamW"], steps=3)
    model = {name: param.detach().clone() for name, param in half._replica.module.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in half.snapshot().items()}
    resumed = trained(
        StepForm(flat_update=True), RULES["AdamW"], steps=3, start=Start(model=model, optimizer=state)
    )
    for name, param in whole._replica.trained.items():
        assert torch.equal(resumed._replica.trained[name], param), name


def test_what_the_kernel_does_not_know_is_refused() -> None:
    with pytest.raises(SpecError, match="RMSprop is none of AdamW, Adam, SGD"):
        trained(StepForm(flat_update=True), lambda params: optim.RMSprop(params))
    with pytest.raises(SpecError, match="amsgrad"):
        trained(StepForm(flat_update=True), lambda params: optim.AdamW(params, amsgrad=True))


@pytest.mark.parametrize(
    "make",
    [*list(RULES.values())[:1], RULES["momentum"], lambda params: optim.RMSprop(params, lr=1e-2)],
    ids=["AdamW", "momentum", "RMSprop"],
)
def test_what_an_optimizer_keeps_elsewhere_changes_no_bit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into many buckets, some parameters in several."""
    monkeypatch.setattr("shoal.step.offloaded.SMALLEST_BUCKET", 128)
    plain, found = (trained(StepForm(offload=where), make) for where in ("none", "optimizer"))
    assert found._offloaded is not None and len(found._offloaded._buckets) > 8
    assert found._offloaded.offloaded_bytes > 0
    for name, param in plain._replica.trained.items():
        assert torch.equal(found._replica.trained[name], param), name
    before, after = plain.snapshot(), found.snapshot()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    state = {name: tensor.clone() for name, tensor in after.items()}
    model = {name: param.detach().clone() for name, param in found._replica.module.state_dict().items()}
    more, again = (
        trained(StepForm(offload=where), make, start=Start(model=model, optimizer=state))
        for where in ("none", "optimizer")
    )
    assert all(torch.equal(p, again._replica.trained[name]) for name, p in more._replica.trained.items())


def test_an_optimizer_that_keeps_nothing_has_nothing_to_offload() -> None:
    with pytest.raises(SpecError, match="SGD keeps nothing"):
        trained(StepForm(offload="optimizer"), RULES["SGD"])
