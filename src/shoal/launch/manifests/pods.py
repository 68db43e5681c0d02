"""One pod of a run: its command, environment, probes and resources."""

from __future__ import annotations

from typing import Any

from kubernetes import client as k8s

from shoal.launch.engines import pods
from shoal.launch.manifests.order import PodOrder
from shoal.launch.remote.probing import SIGN_VARIABLE

KEY_FIELD = "key"
_SIGN = "/tmp/shoal/sign"
_PROBE_S, _STARTS_S = 10, 300
_LEAVE_S = 130
"""A supervisor that is asked to end saves for 120 s at most."""
_LINGER_S = {"jobset": 600, "trainjob": 15}
"""How long a pod that was sent away waits for another supervisor. A JobSet ends it once the first pod is done; a
TrainJob waits for all of them."""


def environment(order: PodOrder) -> list[k8s.V1EnvVar]:
    """The variables of every pod; which one it is, Kubernetes says."""
    plain = {
        pods.HOSTS: str(order.hosts),
        pods.MEETING: order.meeting,
        pods.LINGER: str(_LINGER_S[order.kind]),
        SIGN_VARIABLE: _SIGN,
        "PYTHONUNBUFFERED": "1",
        **order.environment,
    }
    own_address = k8s.V1ObjectFieldSelector(field_path="status.podIP")
    key = k8s.V1SecretKeySelector(name=order.name, key=KEY_FIELD)
    return [
        *(k8s.V1EnvVar(name=name, value=value) for name, value in plain.items()),
        k8s.V1EnvVar(name=pods.ADDRESS, value_from=k8s.V1EnvVarSource(field_ref=own_address)),
        k8s.V1EnvVar(name=pods.KEY, value_from=k8s.V1EnvVarSource(secret_key_ref=key)),
    ]


def resources(order: PodOrder) -> k8s.V1ResourceRequirements:
    """Requests are limits: a worker that is slowed down slows all others down."""
    amounts = {"cpu": order.cores, "memory": order.ram, "nvidia.com/gpu": str(order.gpus or "")}
    given = {name: amount for name, amount in amounts.items() if amount}
    return k8s.V1ResourceRequirements(requests=given or None, limits=given or None)


def mounts(order: PodOrder) -> list[k8s.V1VolumeMount]:
    """Where runs are kept."""
    return [k8s.V1VolumeMount(name="runs", mount_path=order.runs)]


def volumes(order: PodOrder) -> list[k8s.V1Volume]:
    """What is mounted there."""
    if order.volume:
        claim = k8s.V1PersistentVolumeClaimVolumeSource(claim_name=order.volume)
        return [k8s.V1Volume(name="runs", persistent_volume_claim=claim)]
    return [k8s.V1Volume(name="runs", empty_dir=k8s.V1EmptyDirVolumeSource())]


def _probe(*more: str, failures: int) -> k8s.V1Probe:
    command = k8s.V1ExecAction(command=["shoal", "host", "--probe", _SIGN, *more])
    return k8s.V1Probe(
        _exec=command, period_seconds=_PROBE_S, timeout_seconds=_PROBE_S, failure_threshold=failures
    )


def container(order: PodOrder) -> k8s.V1Container:
    """What a pod runs. It has started when its agent lives, and is ready when that has joined the run."""
    return k8s.V1Container(
        name="shoal",
        image=order.image,
        command=order.command,
        env=environment(order),
        ports=[k8s.V1ContainerPort(name="shoal", container_port=order.port)],
        resources=resources(order),
        volume_mounts=mounts(order),
        startup_probe=_probe(failures=_STARTS_S // _PROBE_S),
        liveness_probe=_probe(failures=3),
        readiness_probe=_probe("--joined", failures=1),
        security_context=k8s.V1SecurityContext(
            allow_privilege_escalation=False, capabilities=k8s.V1Capabilities(drop=["ALL"])
        ),
    )


def template(order: PodOrder, labels: dict[str, str]) -> k8s.V1PodTemplateSpec:
    """All pods are made from it."""
    spec = k8s.V1PodSpec(
        containers=[container(order)],
        volumes=volumes(order),
        restart_policy="Never",
        termination_grace_period_seconds=_LEAVE_S,
        automount_service_account_token=False,
    )
    return k8s.V1PodTemplateSpec(metadata=k8s.V1ObjectMeta(labels=labels), spec=spec)


def plain(model: Any) -> Any:
    """A model as what is written."""
    return k8s.ApiClient().sanitize_for_serialization(model)
