"""The objects of one run on Kubernetes."""

from __future__ import annotations

from typing import Any

from kubeflow_trainer_api import models as kubeflow
from kubernetes import client as k8s

from shoal.launch.manifests import pods
from shoal.launch.manifests.order import PodOrder

_OF_JOBSET = "jobset.sigs.k8s.io/jobset-name"
"""The label that a JobSet's controller gives its pods; a TrainJob makes a JobSet of its own name."""
_MISUSED = 2


def documents(order: PodOrder) -> list[dict[str, Any]]:
    """All objects, in the order in which they are to be applied."""
    job = job_set(order) if order.kind == "jobset" else train_job(order)
    return [*(pods.plain(one) for one in (secret(order), service(order), budget(order))), job]


def _metadata(order: PodOrder) -> k8s.V1ObjectMeta:
    return k8s.V1ObjectMeta(name=order.name, namespace=order.namespace or None, labels=_labels(order))


def _labels(order: PodOrder) -> dict[str, str]:
    return {"app.kubernetes.io/name": "shoal", "app.kubernetes.io/instance": order.name}


def secret(order: PodOrder) -> k8s.V1Secret:
    """The run's key: whoever has it belongs to the run."""
    return k8s.V1Secret(
        api_version="v1",
        kind="Secret",
        metadata=_metadata(order),
        type="Opaque",
        immutable=True,
        string_data={pods.KEY_FIELD: order.key.text},
    )


def service(order: PodOrder) -> k8s.V1Service:
    """Names for pods, also for those that are not ready: they become so by meeting at the first one's."""
    port = k8s.V1ServicePort(name="shoal", port=order.port, target_port="shoal")
    spec = k8s.V1ServiceSpec(
        cluster_ip="None", publish_not_ready_addresses=True, selector={_OF_JOBSET: order.name}, ports=[port]
    )
    return k8s.V1Service(api_version="v1", kind="Service", metadata=_metadata(order), spec=spec)


def budget(order: PodOrder) -> k8s.V1PodDisruptionBudget:
    """How many pods must be left where nodes are emptied. A number, since a job's pods cannot be scaled."""
    spec = k8s.V1PodDisruptionBudgetSpec(
        min_available=max(1, order.hosts - order.spared),
        selector=k8s.V1LabelSelector(match_labels={_OF_JOBSET: order.name}),
    )
    return k8s.V1PodDisruptionBudget(
        api_version="policy/v1", kind="PodDisruptionBudget", metadata=_metadata(order), spec=spec
    )


def job(order: PodOrder) -> k8s.V1JobSpec:
    """All pods, numbered. The first one's success is the run's; misuse fails it, and evictions do not count."""
    evicted = k8s.V1PodFailurePolicyRule(
        action="Ignore",
        on_pod_conditions=[k8s.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")],
    )
    misused = k8s.V1PodFailurePolicyRule(
        action="FailJob",
        on_exit_codes=k8s.V1PodFailurePolicyOnExitCodesRequirement(
            container_name="shoal", operator="In", values=[_MISUSED]
        ),
    )
    return k8s.V1JobSpec(
        completions=order.hosts,
        parallelism=order.hosts,
        completion_mode="Indexed",
        backoff_limit=order.restarts * order.hosts,
        pod_failure_policy=k8s.V1PodFailurePolicy(rules=[evicted, misused]),
        success_policy=k8s.V1SuccessPolicy(rules=[k8s.V1SuccessPolicyRule(succeeded_indexes="0")]),
        template=pods.template(order, _labels(order)),
    )


def job_set(order: PodOrder) -> dict[str, Any]:
    """One job of all pods, in the network of the headless service."""
    written = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.plain(_metadata(order)),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": order.name},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": order.job_name, "replicas": 1, "template": {"spec": pods.plain(job(order))}},
            ],
        },
    }
    return _checked(kubeflow.JobsetV1alpha2JobSet, written)


def train_job(order: PodOrder) -> dict[str, Any]:
    """The same by Kubeflow's trainer, whose runtime makes the JobSet. It takes no probes of ours."""
    patch = {
        "name": order.job_name,
        "template": {
            "spec": {
                "template": {
                    "spec": {
                        "volumes": pods.plain(pods.volumes(order)),
                        "containers": [{"name": order.job_name, "volumeMounts": pods.plain(pods.mounts(order))}],
                    }
                }
            }
        },
    }
    written = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.plain(_metadata(order)),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": order.runtime,
            },
            "trainer": {
                "image": order.image,
                "command": order.command,
                "env": pods.plain(pods.environment(order)),
                "numNodes": order.hosts,
                "resourcesPerNode": pods.plain(pods.resources(order)),
            },
            "runtimePatches": [
                {
                    "manager": "shoal.dev/manifests",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }
    return _checked(kubeflow.TrainerV1alpha1TrainJob, written)


def _checked(kind: Any, written: dict[str, Any]) -> dict[str, Any]:
    """As the typed model of its kind reads it: wrong types are refused, and what it does not know is lost."""
    read: dict[str, Any] = kind.from_dict(written).to_dict()
    return read
