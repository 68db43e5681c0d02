"""What the environment says of the world that a process was started in."""

from __future__ import annotations

import json
import socket

import pytest

from shoal.errors import SpecError
from shoal.launch.engines.found import FoundHosts, FoundRank, find_world, guess_local_rank, of_flags
from shoal.launch.engines.slurm import expand_counts

MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURMD_NODENAME": "n2",
    "SLURM_JOB_NUM_NODES": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "0",
}
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1", "a:2"]}


def tf_config(kind: str, index: int, cluster: object = CLUSTER) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def rank_in(environ: dict[str, str], on: str | None = None) -> FoundRank:
    found = find_world(environ, on)
    assert isinstance(found, FoundRank)
    return found


@pytest.mark.parametrize(
    ("environ", "by", "rank", "size", "host"),
    [
        (MPI, "MPI", 2, 4, socket.gethostname()),
        ({**MPI, "SHOAL_HOST_NAME": "n9"}, "MPI", 2, 4, "n9"),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "MPI", 1, 3, socket.gethostname()),
        (STEP, "Slurm job 7", 1, 2, "n2"),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}, "Slurm job 7", 1, 2, "n2"),
        (TORCHRUN, "torchrun", 1, 2, socket.gethostname()),
        ({**STEP, **TORCHRUN}, "torchrun", 1, 2, socket.gethostname()),
        (tf_config("chief", 0), "TF_CONFIG", 0, 5, "a"),
        (tf_config("worker", 1), "TF_CONFIG", 2, 5, "b"),
        (tf_config("ps", 1), "TF_CONFIG", 4, 5, "a"),
    ],
)
def test_ranks(environ: dict[str, str], by: str, rank: int, size: int, host: str) -> None:
    found = rank_in(environ)
    assert (found.by, found.rank, found.size, found.host) == (by, rank, size, host)


def test_servers_are_behind_those_that_train() -> None:
    found = rank_in(tf_config("ps", 0))
    assert (found.workers, found.servers, found.is_worker) == (3, 2, False)
    assert rank_in(tf_config("worker", 1)).local_rank == 1
    evaluator = rank_in(tf_config("evaluator", 0))
    assert evaluator.rank is None and evaluator.identity == found.identity


def test_flags_mean_the_same() -> None:
    config = rank_in(tf_config("worker", 0, {"worker": ["a:1", "b:1"], "ps": ["c:1"]}))
    flags = of_flags("c:1", "a:1,b:1", "worker", 0)
    assert (flags.rank, flags.size, flags.workers, flags.host) == (
        config.rank,
        config.size,
        config.workers,
        config.host,
    )


@pytest.mark.parametrize(("written", "counts"), [("8(x2),4", [8, 8, 4]), ("2", [2]), ("", []), ("8(x", [])])
def test_what_slurm_gives_of_each_host(written: str, counts: list[int]) -> None:
    assert expand_counts(written) == counts


def test_an_allocation_has_hosts_and_no_ranks() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8"}
    assert find_world(script) == FoundHosts(by="Slurm job 7", on="slurm", count=2, workers=8)


@pytest.mark.parametrize(
    ("environ", "on"),
    [
        ({}, None),
        (MPI, "local"),
        (MPI, "ssh:a,b"),
        (MPI, "slurm"),
        ({**MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({**STEP, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        (tf_config("worker", 0, {"worker": ["a:1"]}), None),
        ({"RANK": "0", "WORLD_SIZE": "4"}, None),
        ({"TF_CONFIG": "{}"}, None),
    ],
)
def test_no_world(environ: dict[str, str], on: str | None) -> None:
    assert find_world(environ, on) is None
    assert guess_local_rank(environ if on is None else {}) == 0


def test_another_try_is_another_meeting() -> None:
    assert rank_in(STEP).identity != rank_in({**STEP, "SLURM_RESTART_COUNT": "1"}).identity
    assert rank_in(TORCHRUN).identity != rank_in({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).identity


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "many"}, "OMPI_COMM_WORLD_SIZE is 'many' and no number"),
        ({**MPI, "OMPI_COMM_WORLD_RANK": "4"}, "MPI: this process is said to be rank 4 of 4; start it as the"),
        ({"TF_CONFIG": "[]"}, r"TF_CONFIG must be an object with cluster and task.* found '\[\]'; unset it"),
        (tf_config("worker", 2), "task 2 of type 'worker', but there are 1 chief, 2 worker, 2 ps; give each"),
        (tf_config("boss", 0), "task 0 of type 'boss'"),
    ],
)
def test_what_cannot_be_is_said(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        find_world(environ)
