"""Privacy with many processes: the noise of one, spent as one spends it, and sums whose parts nobody sees."""

from __future__ import annotations

import pytest
import small_tasks
import torch
from torch.nn import functional as F

from helpers.training import Train, largest_difference
from shoal.errors import WorkerFailed
from shoal.ledger.poisson import PoissonOrder
from shoal.roles.training.training import make_schedule
from shoal.spec import Average, Task, parse_strategy
from shoal.step.private import GaussianNoise

KEY, CLIP, NOISE, STEPS = 7, 0.5, 0.8, 20
PRIVATE = f"noise={NOISE},clip={CLIP},key={KEY}"
CLIENTS = "average:clients=12,share=0.5,partition=own,every=2"


def clipped(found: list[torch.Tensor]) -> list[torch.Tensor]:
    norm = float(torch.stack([one.norm() for one in found]).norm())
    return [one * min(1.0, CLIP / norm) for one in found]


def by_hand(task: Task) -> dict[str, torch.Tensor]:
    """DP-SGD over samples, one after the other, in float64 and without dropout."""
    torch.manual_seed(task.seed)
    model = task.model().double().eval()
    params = list(model.parameters())
    optimizer = task.optimizer(params)
    order, noise = PoissonOrder(len(task.train), task.batch_size, KEY), GaussianNoise(NOISE * CLIP, KEY)
    for step in range(1, STEPS + 1):
        total = [torch.zeros_like(param) for param in params]
        for number in order.batch(step):
            inputs, target = task.train[number]
            loss = F.cross_entropy(model(inputs[None].double()), target[None])
            for mine, one in zip(total, clipped(list(torch.autograd.grad(loss, params))), strict=True):
                mine += one
        draw = noise.of(step)
        for param, mine in zip(params, total, strict=True):
            param.grad = (mine + draw.like(mine)) / task.batch_size
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (2, "data"),
        pytest.param(1, "data", marks=pytest.mark.long),
        pytest.param(3, "data", marks=pytest.mark.long),
    ],
)
def test_it_is_what_a_loop_over_samples_does(train: Train, workers: int, strategy: str) -> None:
    ours = train("plain", workers=workers, strategy=strategy, numerics="float64", privacy=PRIVATE)
    assert largest_difference(ours.model, by_hand(small_tasks.plain())) < 1e-9
    assert ours.results["audit"]["clean"]
    assert ours.results["privacy"]["noise"] == NOISE and ours.results["privacy"]["rounds"] == STEPS


@pytest.mark.parametrize("factory", ["plain", pytest.param("mlp", marks=pytest.mark.long)])
def test_any_number_of_workers_comes_to_the_bits_of_one(train: Train, factory: str) -> None:
    one, two = (train(factory, workers=workers, slots=2, privacy=PRIVATE) for workers in (1, 2))
    assert one.digests() == two.digests() and one.losses() == two.losses()
    assert one.results["privacy"] == two.results["privacy"]


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["data:via=ring", "data:via=backend", "data:partition=relay"])
def test_every_way_to_sum_comes_to_the_same(train: Train, strategy: str) -> None:
    ours = train("plain", workers=2, strategy=strategy, numerics="float64", privacy=PRIVATE)
    assert largest_difference(ours.model, by_hand(small_tasks.plain())) < 1e-9


@pytest.mark.long
def test_a_killed_worker_changes_nothing(train: Train) -> None:
    plain, killed = (
        train("plain", workers=2, privacy=PRIVATE, chaos=chaos) for chaos in ("", "kill worker:0 at step 9")
    )
    assert killed.results["privacy"] == plain.results["privacy"] and killed.digests() == plain.digests()


def test_what_was_spent_goes_on_with_the_run_and_ends_it_in_time(train: Train) -> None:
    saved = train("plain", privacy=f"epsilon=6,key={KEY}", checkpoint="every=7")
    spent = saved.results["privacy"]
    assert 5.8 < spent["epsilon"] <= 6.0 and spent["rounds"] == STEPS
    longer = train.resume(saved, 14, overrides={"max_steps": 300}, args={"steps": 300})
    last = longer.results["steps"]
    assert STEPS <= last < STEPS + 5
    expected = {step: loss for step, loss in saved.losses().items() if step > 14}
    assert {step: loss for step, loss in longer.losses().items() if step <= STEPS} == expected
    assert longer.results["privacy"]["epsilon"] <= 6.0 and longer.results["privacy"]["rounds"] == last
    assert any("is spent then" in told["text"] for told in longer.told("line"))
    with pytest.raises(WorkerFailed, match="would spend unseen"):
        train.resume(saved, 14, privacy="none")


def clients_by_hand(task: Task, spec: Average, workers: int) -> dict[str, torch.Tensor]:
    """Clients one after the other, each clipped, and noise on their sum."""
    torch.manual_seed(task.seed)
    model = task.model().double().eval()
    rounds = spec.clients_on(workers)
    assert rounds is not None
    schedule = make_schedule(task, task.train, workers, workers, rounds)
    noise = GaussianNoise(NOISE * CLIP, KEY)
    agreed = [param.detach().clone() for param in model.parameters()]
    for begin in range(1, schedule.total_steps + 1, rounds.steps):
        moved = [torch.zeros_like(param) for param in agreed]
        for first in range(begin, begin + rounds.steps, spec.every):
            for slot in range(workers):
                for param, value in zip(model.parameters(), agreed, strict=True):
                    param.data.copy_(value)
                for step in range(first, first + spec.every):
                    (cut,) = schedule.cuts(step, [slot])
                    inputs, targets = task.train[cut.samples]
                    model.zero_grad()
                    task.loss(model(inputs.double()), targets).backward()
                    for param in model.parameters():
                        param.data -= 1e-3 * param.grad
                change = [param.detach() - value for param, value in zip(model.parameters(), agreed, strict=True)]
                for total, one in zip(moved, clipped(change), strict=True):
                    total += one
        draw = noise.of(begin + rounds.steps - 1)
        flat = torch.cat([one.flatten() for one in moved])
        flat = (flat + draw.like(flat)) / rounds.per_round
        for value, part in zip(agreed, flat.split([one.numel() for one in agreed]), strict=True):
            value += part.view_as(value)
    return dict(zip(dict(model.named_parameters()), agreed, strict=True))


@pytest.mark.parametrize("secure", ["", pytest.param(",secure=on", marks=pytest.mark.long)])
def test_clients_are_clipped_and_noise_is_added_to_their_sum(train: Train, secure: str) -> None:
    how = {"numerics": "float64", "optimizer": "SGD", "overrides": {"max_steps": 12}}
    ours = train("plain", workers=3, strategy=CLIENTS + secure, privacy=PRIVATE, **how)  # type: ignore[arg-type]
    spec = parse_strategy(CLIENTS)
    assert isinstance(spec, Average)
    expected = clients_by_hand(small_tasks.plain(optimizer="SGD", steps=12), spec, 3)
    assert largest_difference(ours.model, expected) < (1e-7 if secure else 1e-9)
    told = ours.results["privacy"]
    assert told["unit"] == "clients" and told["rounds"] == 3 and told["sampling"] == "fixed"


def test_masked_sums_train_as_plain_ones_do_and_go_on_exactly(train: Train) -> None:
    how = {"workers": 3, "optimizer": "SGD", "overrides": {"max_steps": 12}}
    plain = train("plain", strategy=CLIENTS, **how)  # type: ignore[arg-type]
    masked = train("plain", strategy=f"{CLIENTS},secure=on", checkpoint="every=4", **how)  # type: ignore[arg-type]
    assert largest_difference(plain.model, masked.model) < 1e-6
    assert masked.results["wire"]["wire_bytes"] == 2 * masked.results["wire"]["raw_bytes"] > 0
    # Other keys, other masks; the same sums, bit for bit.
    assert train.resume(masked, 8).results["digest"] == masked.results["digest"]
