"""What a coordinator is told about a job."""

from __future__ import annotations

from pathlib import Path

from shoal.coordinator.store import MemoryStore
from shoal.roles.coordinator import PatientStore, describe_decision, make_plan
from shoal.roles.process.pulse import Pulse
from shoal.spec import Cluster, Job, World

DIGITS = Path(__file__).parents[3] / "examples" / "digits.py"


def plan(strategy: str):
    return make_plan(Job(target=str(DIGITS), strategy=strategy, cluster=Cluster(workers=2)), World())


def test_a_long_evaluation_is_no_death():
    assert plan("ps:sync=asp").silent_after_s >= 300


def test_in_lockstep_nothing_is_adjusted():
    assert plan("ps").adjust == () and plan("ps").num_cells == 230
    assert plan("ps:sync=asp").adjust == ("divergence",)
    assert plan("ps:sync=ssp:3,shares=speed,adjust=bound").adjust == ("bound", "divergence", "shares")


def test_stopping_means_no_rollback():
    assert plan("ps:sync=asp,diverging=stop").max_rollbacks == 0
    assert plan("ps:sync=asp,diverging=ignore").adjust == ()


class SlowStore(MemoryStore):
    """Notes what the process says of itself while it waits for the disk."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self.phases: list[str] = []
        self._pulse = pulse

    def save(self, term, state):
        self.phases.append(self._pulse.read(0.2)["phase"])
        super().save(term, state)


def test_who_waits_for_its_store_serves_nobody_meanwhile():
    pulse = Pulse("serving")
    slow = SlowStore(pulse)
    store = PatientStore(slow, pulse)
    assert store.claim(1) and store.load() == (1, None)
    store.save(1, {"view": 7})
    assert store.load() == (1, {"view": 7})
    assert slow.phases == ["saving"] and pulse.read(0.2)["phase"] == "serving"


def test_decisions_read_as_sentences():
    scaled = {"what": "scale", "why": "asked for", "workers": 4, "before": 2}
    assert describe_decision(scaled) == "from 2 to 4 workers, as asked for"
    shares = {"what": "shares", "why": "speeds differ", "shares": {0: 1.5, 1: 0.5}}
    assert describe_decision(shares) == "shares of the data: worker 0 1.50, worker 1 0.50, because speeds differ"


def borders(checkpoint: str, begun_at: int = 0, strategy: str = "ps:sync=asp") -> range:
    job = Job(
        target=str(DIGITS),
        strategy=strategy,
        cluster=Cluster(workers=2),
        checkpoint=checkpoint,
        run_dir="anywhere",
        options={"resume_step": begun_at},
    )
    return make_plan(job, World()).borders


def test_steps_after_which_to_save_are_borders_from_the_beginning():
    """115 steps of two slots."""
    assert list(borders("every=50")) == [100, 200]
    assert list(borders("every=50", begun_at=60)) == [80], "after step 100 of the whole"
    assert list(borders("every=23")) == [46, 92, 138, 184], "the last step is saved at the end anyway"
    assert not borders("every=30s") and not borders("none") and not borders("every=50", strategy="ps")
