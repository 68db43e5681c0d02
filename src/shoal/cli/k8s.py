"""`shoal k8s`: write the manifests that train a task on Kubernetes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.errors import SpecError


def k8s(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="path.py:factory, as the image has it.", show_default=False)
    ],
    image: Annotated[
        str,
        typer.Option(help="With Python, torch, Shoal and the task's file.", metavar="IMAGE", show_default=False),
    ],
    hosts: Annotated[int, typer.Option(help="Pods, each of which is a host of the run.")] = 2,
    name: Annotated[
        str, typer.Option(help="Of the run and of every object; default the target's.", show_default=False)
    ] = "",
    runs: Annotated[str, typer.Option(help="Where pods keep runs.")] = "/runs",
    namespace: Annotated[str, typer.Option(help="Where they are made; default where kubectl is.")] = "",
    cores: Annotated[str, typer.Option(help="CPUs of each pod, as 4.", metavar="N")] = "",
    ram: Annotated[str, typer.Option(help="Memory of each pod, as 16Gi.", metavar="SIZE")] = "",
    gpus: Annotated[int, typer.Option(help="GPUs of each pod.")] = 0,
    env: Annotated[list[str] | None, typer.Option(help="A variable, NAME=VALUE; repeatable.")] = None,
    volume: Annotated[
        str, typer.Option(help="The claim of a volume for runs, which all pods can write; default none.")
    ] = "",
    kind: Annotated[
        str, typer.Option(help="JobSet, or Kubeflow's TrainJob.", metavar="jobset|trainjob")
    ] = "jobset",
    runtime: Annotated[str, typer.Option(help="Of a TrainJob.")] = "torch-distributed",
    port: Annotated[int, typer.Option(help="Where the first pod listens.")] = 29400,
    restarts: Annotated[int, typer.Option(help="How often each pod that failed is started again.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="A folder for them; default all to standard output.", show_default=False)
    ] = None,
) -> None:
    """Write manifests that train a task on pods: a JobSet, a headless service, a secret with the run's key, and a
    disruption budget. Other options are those of shoal train.

    [dim]shoal k8s /app/digits.py --image registry/digits --hosts 2 --workers 4 --strategy ps | kubectl apply -f -
    shoal k8s /app/gpt.py --image registry/gpt --gpus 4 --device cuda -w 8 --volume runs --out manifests[/dim]
    """
    from shoal.launch.manifests.order import PodOrder
    from shoal.launch.manifests.writing import documents_of, write_folder, write_stream

    survives = _check_words(ctx, target, ctx.args)
    order = PodOrder(
        name=name or _name_of(target),
        image=image,
        target=target,
        words=ctx.args,
        hosts=hosts,
        cores=cores,
        ram=ram,
        gpus=gpus,
        environment=dict(_pair(one) for one in env or ()),
        volume=volume,
        runs=runs,
        namespace=namespace,
        kind=kind,
        runtime=runtime,
        port=port,
        restarts=restarts,
        spared=1 if survives and hosts > 1 else 0,
    )
    documents = documents_of(order)
    if out is None:
        write_stream(documents, sys.stdout)
        return
    for path in write_folder(documents, out):
        typer.echo(path)


def _check_words(ctx: typer.Context, target: str, words: Sequence[str]) -> bool:
    """Refuse what `shoal train` would refuse in every pod; whether the run goes on where a host is lost."""
    from shoal.spec import Cluster, Job

    verbs: Any = None if ctx.parent is None else ctx.parent.command
    given = verbs.commands["train"].make_context("train", [target, *words], parent=ctx.parent).params
    for taken in ("on", "name", "resume", "overwrite", "again"):
        if given[taken]:
            raise SpecError(f"shoal k8s: --{taken} is set in the pods by the manifests; leave it out.")
    settings = {"workers": given["workers"], "device": given["device"], "memory": given["memory"]}
    cluster = Cluster(on="k8s", **{key: value for key, value in settings.items() if value is not None})
    job = Job(target=target, cluster=cluster, strategy=given["strategy"] or "data")
    return job.conduct.servers > 0


def _name_of(target: str) -> str:
    """The stem of the target's file, or the last part of its module."""
    path, _, _ = target.partition(":")
    stem = Path(path).stem if path.endswith(".py") else path.rpartition(".")[2]
    return stem.lower().replace("_", "-")


def _pair(written: str) -> tuple[str, str]:
    name, equals, value = written.partition("=")
    if not equals:
        raise SpecError(f"--env must be written NAME=VALUE, found {written!r}.")
    return name, value
