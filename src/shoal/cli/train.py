"""`shoal train`: train a task."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import arguments as option
from shoal.cli.arguments import CLUSTER, RECORD, SCREEN, TASK, given, parse_arguments
from shoal.cli.json_output import print_json
from shoal.cli.ranks import taking_part
from shoal.errors import SpecError
from shoal.launch.engines.found import Found, find_world, of_flags
from shoal.launch.owner import ZYGOTE_VARIABLE

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess
    from shoal.spec import Job


def train(
    ctx: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="path.py:factory or package.module:factory; the factory defaults to task. None with --resume.",
            show_default=False,
        ),
    ] = None,
    workers: option.WorkersOrLimits = None,
    strategy: Annotated[
        str | None,
        typer.Option("--strategy", "-s", help="How: name:key=value,…; default data.", rich_help_panel=CLUSTER),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(
            help="Parts of a global batch; default one per worker. Equal slots and threads give equal bits.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Processes that wait to replace one that dies.", rich_help_panel=CLUSTER)
    ] = None,
    on_failure: Annotated[
        str | None,
        typer.Option(
            help="When a worker dies or raises: replace it, let others do its work (shrink), begin all again from "
            "the newest checkpoint (restart), or stop. Default auto: replace; else restart, with --checkpoint.",
            metavar="WHAT",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    max_failures: Annotated[
        int | None,
        typer.Option(
            help="So many failures within a minute, or restarts without a new checkpoint, a run survives; default "
            "10.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    threads: option.Threads = None,
    device: option.DeviceOrSaved = None,
    port: option.Port = None,
    memory: option.Memory = None,
    store: option.Store = None,
    on: option.On = None,
    interface: option.Interface = None,
    ports: option.Ports = None,
    trusted_network: option.TrustedNetwork = None,
    link: option.LinkOption = None,
    grace: option.Grace = None,
    hosts: option.Hosts = None,
    ps_hosts: option.PsHosts = "",
    worker_hosts: option.WorkerHosts = "",
    job_name: option.JobName = "",
    task_index: option.TaskIndex = 0,
    chaos: Annotated[
        str,
        typer.Option(
            help="Faults to inject: 'kill worker:1 at step 50; hang worker:0 at step 80 for 3s; slow worker:1 x4; "
            "raise worker:0 at step 30', or random:mtbf=10s,kinds=kill+hang.",
            rich_help_panel=CLUSTER,
            show_default=False,
        ),
    ] = "",
    arg: option.FactoryArguments = None,
    batch_size: option.BatchSize = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.", rich_help_panel=TASK)] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.", rich_help_panel=TASK)] = None,
    seed: option.Seed = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Pieces of a worker's batch, to save memory.", rich_help_panel=TASK)
    ] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Evaluate after so many steps.", rich_help_panel=TASK)
    ] = None,
    fold: Annotated[
        str | None,
        typer.Option(
            help="Test on one part of the train set, train on the others: 2/5 is the second of five.",
            rich_help_panel=TASK,
        ),
    ] = None,
    skip_loss_below: Annotated[
        float | None,
        typer.Option(help="Do not learn from parts of a batch whose loss is below this.", rich_help_panel=TASK),
    ] = None,
    loaders: Annotated[
        int | None,
        typer.Option(help="Processes beside each worker that read ahead of it.", rich_help_panel=TASK),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="What the model computes in: fp32, bf16, fp16, adaptive (layers that half precision is too small "
            "for in float32), or with --fast auto.",
            metavar="TYPE",
            rich_help_panel=TASK,
        ),
    ] = None,
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute",
            help="Compute blocks of the model again in the backward pass, to save memory.",
            rich_help_panel=TASK,
            show_default=False,
        ),
    ] = None,
    privacy: option.PrivacyAsked = None,
    compile: option.Compile = None,
    graph: option.Graph = None,
    memory_format: option.MemoryFormat = None,
    products: option.Products = None,
    convolutions: option.Convolutions = None,
    loss_in_pieces: option.LossInPieces = None,
    flat_update: option.FlatUpdate = None,
    offload: option.Offload = None,
    fast: Annotated[
        bool | None,
        typer.Option(
            "--fast",
            help="Try the ways above for a few steps, and with --precision auto bf16, and take the fastest.",
            rich_help_panel=TASK,
            show_default=False,
        ),
    ] = None,
    sync_device: Annotated[
        bool | None,
        typer.Option(
            "--sync-device/--no-sync-device",
            help="Let a GPU do one thing after the other, so that errors point at what caused them.",
            rich_help_panel=TASK,
            show_default=False,
        ),
    ] = None,
    weights_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Begin from the weights of a run, RUN@STEP or FILE.safetensors.",
            metavar="RUN|FILE",
            rich_help_panel=TASK,
        ),
    ] = None,
    skip_seen: Annotated[
        bool,
        typer.Option(
            "--skip-seen",
            help="With --from: leave out the samples that the checkpoint has seen.",
            rich_help_panel=TASK,
        ),
    ] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Save the training state: every=200 (steps), every=5m, auto or none; ,keep=3 behind it.",
            metavar="RULE",
            rich_help_panel=RECORD,
        ),
    ] = None,
    archive: Annotated[
        str | None,
        typer.Option(
            help="Put checkpoints, model, logs and report under a URL, too, as s3://bucket/runs; none: no more.",
            metavar="URL",
            rich_help_panel=RECORD,
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with a run after its newest checkpoint, or that of a step; what is not given stays. Also "
            "one of an archive, URL/RUN.",
            metavar="RUN[@STEP]",
            rich_help_panel=RECORD,
        ),
    ] = None,
    trust: option.Trust = False,
    name: Annotated[
        str | None, typer.Option(help="The run's name; default target and time.", rich_help_panel=RECORD)
    ] = None,
    runs: option.Runs = Path("runs"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run of that name.", rich_help_panel=RECORD)
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Go on with the run of that name after its newest checkpoint; begin it anew where it has none: "
            "for jobs that somebody starts again.",
            rich_help_panel=RECORD,
        ),
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Log to csv, tensorboard, wandb[:project] or mlflow[:uri] as well; repeatable.",
            metavar="NAME[:SETTING]",
            rich_help_panel=RECORD,
        ),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="The same as --log tensorboard.", rich_help_panel=RECORD)
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the plan in place of training.", rich_help_panel=SCREEN)
    ] = False,
    progress: option.Progress = None,
    as_json: option.AsJson = False,
) -> None:
    """Train a task with one or many processes of this machine, or of several.

    [dim]shoal train digits.py
    shoal train digits.py --workers 4 --spares 1
    shoal train digits.py --workers 1:4 --on-failure shrink
    shoal train digits.py -w 4 --strategy data:via=ring --arg width=512 --epochs 3
    shoal train digits.py -w 4 --strategy ps:servers=2,sync=ssp:3 --explain
    shoal train gpt.py -w 4 --strategy mesh:data=2,tensor=2
    shoal train digits.py -w 4 --strategy ps:servers=2 --on ssh:a,b
    shoal train digits.py --checkpoint every=200 --name mine
    shoal train --resume mine --workers 2[/dim]
    """
    if on == "k8s" and _follows_another(ctx.obj):
        return
    if again:
        target, resume, overwrite, arg = _found_again(target, name, runs, arg)
    cluster = given(workers=workers, spares=spares, threads=threads, device=device, port=port, memory=memory)
    cluster |= given(on=on, interface=interface, ports=ports, trusted_network=trusted_network, grace=grace)
    if target is None and resume is None:
        raise typer.BadParameter("name a task, path.py:factory, or a run with --resume.", ctx, param_hint="TARGET")
    cluster |= given(store=store, link=link, hosts=hosts)
    overrides = given(
        batch_size=batch_size,
        epochs=epochs,
        max_steps=max_steps,
        seed=seed,
        accumulate=accumulate,
        evaluate_every=evaluate_every,
        fold=fold,
        skip_loss_below=skip_loss_below,
        loaders=loaders,
    )
    said: dict[str, Any] = {"strategy": strategy, "cluster": cluster, "slots": slots, "chaos": chaos}
    said |= {"checkpoint": checkpoint, "on_failure": on_failure, "max_failures": max_failures}
    said |= {"precision": precision, "recompute": recompute, "compile": compile, "graph": graph, "fast": fast}
    said |= {"privacy": privacy}
    said |= {"memory_format": memory_format, "products": products, "convolutions": convolutions}
    said |= {"loss_in_pieces": loss_in_pieces}
    said |= {"sync_device": sync_device}
    said |= {"flat_update": flat_update, "offload": offload}
    arguments = parse_arguments(arg or ())
    found = _found_world(on, ps_hosts, worker_hosts, job_name, task_index)
    with taking_part(found, said, runs, ctx.obj, to_stderr=as_json):
        if explain:
            from shoal.cli.explain import explain as show_plan

            job = _planned_job(target, arguments, resume, runs, {**said, "overrides": overrides}, trust=trust)
            show_plan(job, ctx.obj, as_json=as_json)
            return
        from shoal.launch.runs import train as start

        run = start(
            target,
            args=arguments,
            archive=archive,
            resume=resume,
            trust=trust,
            weights_from=weights_from,
            skip_seen=skip_seen,
            name=None if again and resume else name,
            runs=runs,
            overwrite=overwrite,
            progress=progress,
            output=sys.stderr if as_json else None,
            log=log or None,
            tensorboard=tensorboard,
            zygote=ctx.obj,
            **said,
            **overrides,
        )
    if as_json:
        print_json({"run": str(run.folder), **run.results})


def _found_world(on: str | None, ps_hosts: str, worker_hosts: str, job_name: str, task_index: int) -> Found | None:
    """The world that flags tell of, else the environment."""
    if job_name or worker_hosts or ps_hosts:
        return of_flags(ps_hosts, worker_hosts, job_name, task_index)
    return find_world(os.environ, on)


def _follows_another(zygote: ZygoteProcess | None) -> bool:
    """In a pod that is not the first of its job: take part in the run until it is over; whether this was one."""
    from shoal.cli.host import exit_quietly
    from shoal.launch.engines.pods import take_part

    before = signal.signal(signal.SIGTERM, lambda *_: exit_quietly())
    if zygote is not None:
        os.environ[ZYGOTE_VARIABLE] = zygote.name  # The agent in this pod need not start another.
    try:
        return take_part()
    finally:
        signal.signal(signal.SIGTERM, before)


def _found_again(
    target: str | None, name: str | None, runs: Path, arguments: list[str] | None
) -> tuple[str | None, str | None, bool, list[str] | None]:
    """Target, run to resume, whether to overwrite, and arguments of a run that may have been started before."""
    from shoal.checkpoint.wholeness import check_folder, newest_whole
    from shoal.observe import RunFolder

    if name is None:
        raise SpecError("--again goes on with the run of a name; give it one with --name.")
    folder = RunFolder((runs / name).absolute())
    if newest_whole(folder.checkpoints, check_folder, lambda text: print(text, file=sys.stderr)) is None:
        return target, None, True, arguments
    return None, name, False, None


def _planned_job(
    target: str | None,
    arguments: dict[str, Any],
    resume: str | None,
    runs: Path,
    said: dict[str, Any],
    *,
    trust: bool,
) -> Job:
    """The job that would be run."""
    from shoal.launch.resuming import find_whole, resumed_job
    from shoal.launch.runs import new_job
    from shoal.observe.checkpoint_names import find_run
    from shoal.observe.trust import trusted_job

    if resume is None:
        return new_job(target, arguments, {}, said)
    saved = trusted_job(find_run(resume, runs), trust=trust)
    path, manifest = find_whole(resume, runs, lambda text: print(text, file=sys.stderr))
    return resumed_job(saved, path, manifest, said)
