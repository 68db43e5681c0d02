"""What the user asks Kubernetes for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.comm.security import RunKey
from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count

KINDS = ("jobset", "trainjob")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""With what Kubernetes adds (`-hosts-0-0`, five letters of its own) a pod's name must fit into 63 characters."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"\d+(\.\d+)?([kMGTPE]i?|m)?")
_TAKEN = ("JOB_COMPLETION_INDEX",)
_OURS = "SHOAL_"


@dataclass(frozen=True, kw_only=True)
class PodOrder:
    """One run on Kubernetes: how many pods, of what, and what they train."""

    name: str
    """Of the run and of every object."""
    image: str
    """With Python, torch, Shoal and the task's file."""
    target: str
    words: Sequence[str] = ()
    """Further words of `shoal train`."""
    hosts: int = 2
    """Pods, each of which is a host of the run."""
    key: RunKey = field(default_factory=RunKey.create, repr=False)
    cores: str = ""
    ram: str = ""
    gpus: int = 0
    """What each pod gets; nothing: what the cluster gives it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    volume: str = ""
    """The claim of a volume that all pods can write, for runs; nothing: they go with their pod."""
    runs: str = "/runs"
    """Where it is mounted."""
    namespace: str = ""
    kind: str = "jobset"
    runtime: str = "torch-distributed"
    """With `kind=trainjob`: the runtime of Kubeflow's that it refers to."""
    port: int = 29400
    """Where the first pod listens."""
    restarts: int = 3
    """How often pods that failed are started again."""
    spared: int = 0
    """How many pods may be taken away at a time: whose loss costs no more than their work."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(
                f"Kubernetes: name={self.name!r} must be at most 40 small letters, digits and hyphens, beginning "
                "with a letter; give it with --name."
            )
        require_count("Kubernetes", "hosts", self.hosts)
        require_count("Kubernetes", "gpus", self.gpus, least=0)
        require_count("Kubernetes", "restarts", self.restarts, least=0)
        require_choice("Kubernetes", "kind", self.kind, KINDS)
        if not 1024 <= self.port < 65536:
            raise SpecError(f"Kubernetes: port must be between 1024 and 65535, found {self.port}.")
        if not self.image:
            raise SpecError(
                "Kubernetes: image is empty; name one that has Python, torch, Shoal and the task's file."
            )
        if not self.runs.startswith("/"):
            raise SpecError(f"Kubernetes: runs={self.runs} must be an absolute path: a volume is mounted there.")
        for name, value in (("cores", self.cores), ("ram", self.ram)):
            if value and not _QUANTITY.fullmatch(value):
                raise SpecError(f"Kubernetes: {name} must be a quantity such as 4, 500m or 16Gi, found {value!r}.")
        for variable in self.environment:
            if not _VARIABLE.fullmatch(variable) or variable in _TAKEN or variable.startswith(_OURS):
                raise SpecError(
                    f"Kubernetes: {variable!r} is no name for a variable of yours; those that begin with {_OURS} "
                    "are set by the manifests."
                )

    @property
    def job_name(self) -> str:
        """What the JobSet calls the job of all pods: it becomes a part of their names."""
        return "hosts" if self.kind == "jobset" else "node"

    @property
    def meeting(self) -> str:
        """Where the first pod listens: by the name that the headless service gives it."""
        return f"tcp://{self.name}-{self.job_name}-0-0.{self.name}:{self.port}"

    @property
    def command(self) -> list[str]:
        """What every pod runs: the same, for it finds by its environment who it is."""
        named = ["--on", "k8s", "--name", self.name, "--runs", self.runs, "--again", "--plain"]
        return ["shoal", "train", self.target, *self.words, *named]
