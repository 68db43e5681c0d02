"""Manifests for Kubernetes: what `shoal k8s` writes.

| file          | what it has                                                                     |
|---------------|---------------------------------------------------------------------------------|
| `order.py`    | what the user asks for                                                          |
| `pods.py`     | one pod: command, environment, probes, resources                                |
| `kinds.py`    | the objects: JobSet or TrainJob, headless service, secret, disruption budget    |
| `writing.py`  | them as YAML, to a stream or a folder                                           |

They are made of typed models (`kubernetes`, `kubeflow_trainer_api`), which are imported where they are used.
"""
