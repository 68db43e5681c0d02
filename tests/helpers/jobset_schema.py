"""The parts of JobSet's public definition (jobset.x-k8s.io/v1alpha2) that manifests may use, as a JSON schema.

Its job template is Kubernetes' own JobTemplateSpec, which the models of `kubernetes` check.
"""

from __future__ import annotations

from typing import Any


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT, _WHOLE, _TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_TEXTS = {"type": "array", "items": _TEXT}
_METADATA = _object(name=_TEXT, namespace=_TEXT, labels={"type": "object"}, annotations={"type": "object"})

JOBSET = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_METADATA,
    spec=_object(
        coordinator=_object(("replicatedJob",), jobIndex=_WHOLE, podIndex=_WHOLE, replicatedJob=_TEXT),
        failurePolicy=_object(
            maxRestarts=_WHOLE,
            restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
            rules={
                "type": "array",
                "items": _object(
                    ("action", "name"),
                    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
                    name=_TEXT,
                    onJobFailureReasons=_TEXTS,
                    targetReplicatedJobs=_TEXTS,
                ),
            },
        ),
        managedBy=_TEXT,
        network=_object(enableDNSHostnames=_TRUTH, publishNotReadyAddresses=_TRUTH, subdomain=_TEXT),
        replicatedJobs={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ("name", "template"),
                name=_TEXT,
                groupName=_TEXT,
                replicas=_WHOLE,
                template=_object(metadata=_METADATA, spec={"type": "object"}),
                dependsOn={"type": "array"},
            ),
        },
        startupPolicy=_object(("startupPolicyOrder",), startupPolicyOrder={"enum": ["AnyOrder", "InOrder"]}),
        successPolicy=_object(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=_TEXTS),
        suspend=_TRUTH,
        ttlSecondsAfterFinished=_WHOLE,
    ),
)
