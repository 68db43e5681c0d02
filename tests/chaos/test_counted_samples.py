"""Each sample once per epoch: by a model whose weights count, beside the system's own audit.

Processes are killed, stopped and made to fail from outside, whenever; then the supervisor itself is killed, and
the run resumed.
"""

from __future__ import annotations

import random

import pytest

from helpers.counting import Assault, CountedRun, applied, assert_each_once

WORKERS = 2
WAYS = {
    "data": ("worker",),
    "ps:servers=2": ("worker", "server", "coordinator"),
    "ps:servers=2,sync=asp": ("worker", "server", "coordinator"),
    "average:every=5": ("worker",),
}
"""Strategies, and the roles of their processes. A worker that averages moves its own model by each of its samples
twice, which the other has not: in the mean that is once."""


def assail(tmp_path, zygote, strategy: str, *, rounds: int, seed: int, early: int = 0) -> None:
    """In each round one strike of every kind, `early` kills that wait for nothing, and the supervisor's end."""
    roles, epochs, chance = WAYS[strategy], 60 * rounds, random.Random(seed)
    words = f"--strategy {strategy} --workers {WORKERS} --checkpoint every=16 --max-failures 1000".split()
    run = CountedRun(tmp_path, zygote, *words, "--arg", f"epochs={epochs}", "--arg", "pause_s=0.05")
    assault = Assault(run, zygote, chance)
    strikes = [("kill", role) for role in roles] + [("raise", "worker"), ("stop", "worker")]
    try:
        for _ in range(rounds):
            for kind, role in chance.sample(strikes, len(strikes)):
                assault.strike(kind, role)
            for _ in range(early):
                assault.strike_early(chance.choice(roles))
            run.kill_and_resume()
        results = run.finish()
    finally:
        run.close()
    assert assault.done.total() == rounds * (len(strikes) + early)
    assert run.events("lost") >= rounds * len(strikes) and run.events("hung") >= rounds
    assert_each_once(results, applied(run.path / "model.safetensors"), epochs)


# In lockstep not one bit changes under fire, which other tests hold.
@pytest.mark.parametrize(
    "strategy",
    [
        "ps:servers=2,sync=asp",
        pytest.param("data", marks=pytest.mark.long),
        pytest.param("ps:servers=2", marks=pytest.mark.long),
        pytest.param("average:every=5", marks=pytest.mark.long),
    ],
)
def test_each_sample_is_applied_once_per_epoch(tmp_path, zygote, strategy):
    assail(tmp_path, zygote, strategy, rounds=1, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("strategy", WAYS)
def test_whatever_happens_each_sample_is_applied_once_per_epoch(tmp_path, zygote, strategy, seed):
    assail(tmp_path, zygote, strategy, rounds=4, seed=seed, early=3)
