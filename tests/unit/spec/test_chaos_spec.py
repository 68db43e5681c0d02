"""Faults as a user writes them: what is understood, what is refused, and how both read."""

from dataclasses import replace

import pytest

from shoal.errors import SpecError
from shoal.spec import Cluster, Job
from shoal.spec.chaos import Chaos, Fault, RandomFaults, parse_chaos

WRITTEN = {
    "kill worker:1 at step 50": Fault(kind="kill", rank=1, step=50),
    "hang worker:0 at step 80 for 3s": Fault(kind="hang", step=80, seconds=3.0),
    "hang server:1 at step 8": Fault(kind="hang", role="server", rank=1, step=8),
    "slow worker:1 x4 at step 20 for 0.5s": Fault(kind="slow", rank=1, step=20, factor=4.0, seconds=0.5),
    "raise worker:0 at step 30": Fault(kind="raise", step=30),
    "raise worker:0 at step 30 always": Fault(kind="raise", step=30, always=True),
    "kill coordinator at step 60": Fault(kind="kill", role="coordinator", step=60),
}


@pytest.mark.parametrize(("text", "fault"), WRITTEN.items())
def test_a_fault_is_written_as_it_reads(text, fault):
    assert parse_chaos(text) == Chaos(faults=(fault,))
    assert str(fault) == text


def test_many_faults_are_read_in_order_and_written_back():
    chaos = parse_chaos(" ;".join(WRITTEN) + "; random:every=2s,kinds=kill+hang,targets=server,seed=7;")
    assert chaos.faults == tuple(WRITTEN.values())
    assert chaos.random == RandomFaults(
        mean_s=2.0, fixed=True, kinds=("kill", "hang"), targets=("server",), seed=7
    )
    assert parse_chaos(str(chaos)) == chaos
    assert chaos.steps == {8, 20, 30, 50, 60, 80}


def test_slowness_may_last_from_the_first_step_to_the_last():
    (fault,) = parse_chaos("slow worker:1 x4").faults
    assert (fault.step, fault.seconds) == (1, None)


def test_random_faults_have_defaults():
    assert parse_chaos("random:mtbf=10s").random == RandomFaults(
        mean_s=10.0, fixed=False, kinds=("kill",), targets=("worker",), seed=0
    )


def test_no_faults_are_no_chaos():
    assert not parse_chaos("") and not Job(target="x.py").chaos
    assert parse_chaos("random:mtbf=1s")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("kil worker:0 at step 3", "Did you mean 'kill'? Choose one of: hang, kill, raise, random, slow."),
        ("kill", "Choose one of: coordinator, server, worker."),
        ("kill boss:0 at step 3", "Choose one of: coordinator, server, worker."),
        ("kill worker at step 3", "names no rank; write worker:0"),
        ("kill worker:one at step 3", "'one' in 'kill worker:one at step 3' is no whole number"),
        ("kill worker:0", "does not say when; add at step 50"),
        ("kill worker:0 at step 0", "step must be a whole number of at least 1, found 0"),
        ("kill worker:0 at 3", "write KIND ROLE:RANK [xFACTOR] [at step N] [for 3s] [always]"),
        ("kill worker:0 at step 3 soon", "'soon' in 'kill worker:0 at step 3 soon' is not understood"),
        ("kill worker:0 at step 3 for 2s", "hang and slow may last"),
        ("kill worker:0 x2 at step 3", "takes no factor, found x2"),
        ("kill worker:0 at step 3 always", "always is for raise"),
        ("hang worker:0 at step 3 for 0s", "more than none"),
        ("hang worker:0 at step 3 for nans", "more than none"),
        ("slow worker:0 at step 3", "needs a factor above 1, found 1; write x4"),
        ("slow worker:0 xfast", "'fast' in 'slow worker:0 xfast' is no number"),
        ("raise server:0 at step 3", "raise is for workers, found server:0; a server can be killed, or hang"),
        ("random", "needs either mtbf or every"),
        ("random:mtbf=1s,every=2s", "needs either mtbf or every"),
        ("random:mtbf=0s", "need a time between them, found 0s"),
        ("random:mtbf=1s,speed=3", "Choose one of: every, kinds, mtbf, seed, targets."),
        ("random:mtbf=1s,kinds=explode", "Choose one of: hang, kill, raise, slow."),
        ("random:mtbf=1s,kinds=slow+raise,targets=server", "add kill or hang, or the target worker"),
        ("random:mtbf=1s; random:mtbf=2s", "is the second random: of this run"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(text, hint):
    with pytest.raises(SpecError, match=r"^chaos: ") as caught:
        parse_chaos(text)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "strategy", "hint"),
    [
        ("kill worker:2 at step 1", "data", "this job has worker:0 to worker:1; name one of these"),
        ("kill server:0 at step 1", "data", "names server:0, but this job has worker:0 to worker:1"),
        ("kill server:1 at step 1", "ps:servers=1", "worker:0 to worker:1, server:0, coordinator"),
        ("random:mtbf=1s,targets=coordinator", "data", "names a coordinator, but this job has worker:0"),
    ],
)
def test_a_target_must_be_a_process_of_the_job(text, strategy, hint):
    with pytest.raises(SpecError) as caught:
        Job(target="x.py", strategy=strategy, cluster=Cluster(workers=2), chaos=text)
    assert hint in str(caught.value)


def test_a_job_keeps_its_faults_as_text():
    job = Job(
        target="x.py",
        strategy="ps:servers=2",
        cluster=Cluster(workers=2),
        chaos="kill server:1   at step 4;slow worker:1 x3",
    )
    assert job.chaos == "kill server:1 at step 4; slow worker:1 x3 at step 1"
    assert Job.from_json(job.to_json()) == job
    with pytest.raises(SpecError, match="is for training, but purpose=evaluate"):
        replace(job, strategy="data", purpose="evaluate")
