"""Manifests for Kubernetes: every object is one that its model or schema knows, and says what was asked for."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubeflow_trainer_api import models as kubeflow
from kubernetes import client as k8s

from helpers.jobset_schema import JOBSET
from shoal.cli.app import run
from shoal.comm.security import RunKey
from shoal.errors import SpecError
from shoal.launch.engines.pods import PodWorld, take_part
from shoal.launch.manifests.kinds import documents
from shoal.launch.manifests.order import PodOrder

CORE = {
    "Secret": k8s.V1Secret,
    "Service": k8s.V1Service,
    "PodDisruptionBudget": k8s.V1PodDisruptionBudget,
}


def read_strictly(kind: type, written: Any, where: str = "") -> None:
    """Every name and type that was written is one of the model's, down to the last."""
    names = {kind.attribute_map[name]: declared for name, declared in kind.openapi_types.items()}
    assert set(written) <= set(names), f"{where}: {set(written) - set(names)} are not known of {kind.__name__}"
    for name, value in written.items():
        read_as(names[name], value, f"{where}.{name}")
    kind(**{plain: written.get(name) for plain, name in kind.attribute_map.items()})  # what it requires is there


def read_as(declared: str, value: Any, where: str) -> None:
    if found := re.fullmatch(r"List\[(.+)\]", declared):
        assert isinstance(value, list), where
        for index, one in enumerate(value):
            read_as(found[1], one, f"{where}[{index}]")
    elif found := re.fullmatch(r"Dict\[str, (.+)\]", declared):
        assert isinstance(value, dict), where
        for name, one in value.items():
            read_as(found[1], one, f"{where}.{name}")
    elif declared in ("str", "int", "bool"):
        assert type(value).__name__ == declared, f"{where} is {value!r}, not {declared}"
    elif declared != "object":
        read_strictly(getattr(k8s, declared), value, where)


def written(**changes: Any) -> dict[str, dict[str, Any]]:
    """Objects by kind, as they are read from YAML again."""
    order = PodOrder(**{"name": "mine", "image": "some/image:1", "target": "/app/digits.py", **changes})
    return {one["kind"]: one for one in yaml.safe_load(yaml.safe_dump(documents(order)))}


FULL = {
    "hosts": 3,
    "cores": "4",
    "ram": "16Gi",
    "gpus": 2,
    "environment": {"OMP_NUM_THREADS": "1"},
    "volume": "shared",
    "namespace": "team",
    "words": ("--workers", "6", "--strategy", "ps"),
    "spared": 1,
}


@pytest.mark.parametrize("changes", [{}, FULL, {**FULL, "kind": "trainjob"}], ids=["plain", "full", "trainjob"])
def test_every_object_is_what_its_kind_allows(changes: dict[str, Any]) -> None:
    found = written(**changes)
    for name, kind in CORE.items():
        read_strictly(kind, found.pop(name), name)
    ((name, job),) = found.items()
    if name == "JobSet":
        jsonschema.validate(job, JOBSET)
        (replicated,) = job["spec"]["replicatedJobs"]
        read_strictly(k8s.V1JobTemplateSpec, replicated["template"], "template")
    typed = {"JobSet": kubeflow.JobsetV1alpha2JobSet, "TrainJob": kubeflow.TrainerV1alpha1TrainJob}[name]
    read = typed.from_dict(job)
    assert read.to_dict() == job


def test_a_name_or_type_that_kubernetes_does_not_know_is_found() -> None:
    """The checks above can fail."""
    service = written()["Service"]
    with pytest.raises(AssertionError, match="clusterIp"):
        read_strictly(k8s.V1Service, {**service, "spec": {"clusterIp": "None"}}, "Service")
    with pytest.raises(AssertionError, match="port is '29400'"):
        read_strictly(k8s.V1Service, {**service, "spec": {"ports": [{"port": "29400"}]}}, "Service")
    job = written()["JobSet"]
    job["spec"]["replicatedJobs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(job, JOBSET)


def test_what_was_asked_for_is_there() -> None:
    key = RunKey.create()
    found = written(**FULL, key=key)
    assert found["Secret"]["stringData"] == {"key": key.text}
    assert found["PodDisruptionBudget"]["spec"]["minAvailable"] == 2
    assert {one["metadata"]["namespace"] for one in found.values()} == {"team"}
    job = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    amounts = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"requests": amounts, "limits": amounts}
    assert container["command"][:6] == ["shoal", "train", "/app/digits.py", *FULL["words"][:3]]
    assert {"name": "OMP_NUM_THREADS", "value": "1"} in container["env"]
    assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "shared"}}]
    del found["Secret"]
    assert key.text not in yaml.safe_dump(found), "the key is in the secret alone"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "Mine"}, "name='Mine' must be at most 40 small letters"),
        ({"name": "m" * 41}, "at most 40"),
        ({"hosts": 0}, "hosts"),
        ({"ram": "much"}, "ram must be a quantity such as 4, 500m or 16Gi, found 'much'"),
        ({"environment": {"SHOAL_KEY": "x"}}, "'SHOAL_KEY' is no name for a variable of yours"),
        ({"kind": "pod"}, "kind"),
        ({"port": 80}, "port must be between 1024 and 65535"),
        ({"runs": "runs"}, "must be an absolute path"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)):
        written(**changes)


def test_the_verb_writes_files_that_nobody_else_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["k8s", "/app/my_task.py", "--image", "one", "--workers", "4", "--strategy", "ps:servers=2"]
    assert run([*words, "--out", str(tmp_path / "here")]) == 0
    files = sorted((tmp_path / "here").iterdir())
    assert [one.name for one in files] == [
        *("0-secret.yaml", "1-service.yaml", "2-poddisruptionbudget.yaml", "3-jobset.yaml")
    ]
    assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}
    capsys.readouterr()
    assert run(words) == 0
    (_, _, budget, job) = yaml.safe_load_all(capsys.readouterr().out)
    assert job["metadata"]["name"] == "my-task"
    assert budget["spec"]["minAvailable"] == 1, "servers have backups: one of two hosts may go"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--wrokers", "2"], "No such option: --wrokers"),
        (["--strategy", "pss"], "Did you mean 'ps'?"),
        (["--on", "ssh:a"], "--on is set in the pods by the manifests"),
        (["--env", "ALONE"], "--env must be written NAME=VALUE"),
        (["--strategy", "data:via=arena"], "on=k8s"),
    ],
)
def test_what_every_pod_would_refuse_is_refused_here(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["k8s", "/app/digits.py", "--image", "one", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_outside_of_a_pod_a_sentence_says_what_is_missing() -> None:
    with pytest.raises(SpecError, match=r"JOB_COMPLETION_INDEX, SHOAL_HOSTS, SHOAL_MEETING, SHOAL_KEY is not in"):
        take_part({})


def test_a_pod_finds_who_it_is_and_does_not_show_the_key() -> None:
    key = RunKey.create()
    given = {
        "JOB_COMPLETION_INDEX": "1",
        "SHOAL_HOSTS": "2",
        "SHOAL_MEETING": "tcp://a.b:1",
        "SHOAL_KEY": key.text,
    }
    world = PodWorld.found(given)
    assert (world.index, world.hosts, world.name) == (1, 2, "pod-1")
    assert key.text not in repr(world)
    with pytest.raises(SpecError, match="names none of the 2 pods"):
        PodWorld.found({**given, "JOB_COMPLETION_INDEX": "2"})
    with pytest.raises(SpecError, match="SHOAL_HOSTS must be a number, found 'two'"):
        PodWorld.found({**given, "SHOAL_HOSTS": "two"})
