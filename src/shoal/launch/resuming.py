"""Going on with an earlier run: which checkpoint, and what its job becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.aside import count_aside
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.wholeness import check_folder, newest_whole
from shoal.errors import CheckpointError, SpecError
from shoal.observe import RunFolder
from shoal.observe.checkpoint_names import find_checkpoint, folder_name, names_checkpoint, step_folders
from shoal.spec import Cluster, Job, parse_strategy

Report = Callable[[str], None]
_OF_ONE_ATTEMPT = (
    *("scratch", "from", "resume", "resume_step", "resume_has_model"),
    *("state", "timeline", "failures", "ran_s"),
)
"""Options that say nothing about the attempt that goes on."""
_ASIDE = {
    "head": "heads that only layer:decoupled=on trains",
    "unsent": "gradients that were not sent yet, with which only what compresses them goes on",
    "replica": "workers' own, with which only average goes on",
}
"""By the first word of their names: what tensors are that were put aside."""
_KEPT_UNLESS_SAID = (
    *("checkpoint", "on_failure", "max_failures", "precision", "recompute", "privacy"),
    *("compile", "graph", "memory_format", "products", "convolutions"),
    *("loss_in_pieces", "flat_update", "offload"),
    *("fast", "sync_device"),
)


def find_whole(text: str, root: str | Path, report: Report) -> tuple[Path, Manifest]:
    """The checkpoint that `RUN@STEP` or a folder names, or the newest whole one of `RUN`; all of it was checked.

    `report` is told of those that are torn and were passed over.
    """
    if names_checkpoint(text):
        path = find_checkpoint(text, root)
        return path, check_folder(path)
    folder = RunFolder.open(text, root)
    manifest = newest_whole(folder.checkpoints, check_folder, report)
    if manifest is None:
        raise CheckpointError(
            f"Run {folder.name!r} has no whole checkpoint to resume from; train with --checkpoint every=200, or "
            "begin from its model with --from."
        )
    return folder.checkpoints / folder_name(manifest.step), manifest


def resumed_job(saved: Job, path: Path, manifest: Manifest, changes: Mapping[str, Any]) -> Job:
    """The job of a run that goes on: as it was, but for what the user says now."""
    strategy = parse_strategy(changes.get("strategy") or saved.strategy)
    cluster = merged_cluster(saved.cluster, changes.get("cluster"))
    slots = changes.get("slots")
    if slots is None and strategy.conduct(cluster).slots_are_free:
        # The same cuts give the same bits; more workers than parts need finer ones.
        slots = max(int(manifest.facts["slots"]), cluster.places)
    said = {name: changes[name] for name in _KEPT_UNLESS_SAID if changes.get(name) is not None}
    kept = {name: value for name, value in saved.options.items() if name not in _OF_ONE_ATTEMPT}
    return replace(
        saved,
        strategy=str(strategy),
        cluster=cluster,
        slots=slots,
        overrides={**saved.overrides, **changes.get("overrides", {})},
        chaos=changes.get("chaos") or "",
        options={
            **kept,
            "resume": str(path),
            "resume_step": manifest.step,
            "resume_has_model": RunFolder(path.parent.parent).model.is_file(),
        },
        **said,
    )


def left_out(job: Job, manifest: Manifest) -> str:
    """One line about what a resumed job has no use for in its checkpoint; empty where there is nothing."""
    counts = count_aside(one.name for one in manifest.files["optimizer"].locations)
    found = [
        f"{count} tensors of {_ASIDE[word]}" for word, count in counts.items() if word != job.conduct.puts_aside
    ]
    return f"left out: {', '.join(found)}" if found else ""


def merged_cluster(saved: Cluster, said: Cluster | Mapping[str, Any] | None) -> Cluster:
    """The cluster that was, but for the fields that are given now."""
    if isinstance(said, Cluster):
        return said
    fields = dict(said or {})
    if "workers" in fields:  # limits go with the number that they were given with
        fields |= {"min_workers": None, "max_workers": None}
    return replace(saved, **fields)


def first_options(source: str, root: str | Path, report: Report, *, skip_seen: bool) -> dict[str, Any]:
    """What a new job must know to begin from the weights of `source`.

    That is a run, for its last model or else its newest checkpoint, `RUN@STEP`, or a safetensors file. With
    `skip_seen` it trains on samples that the checkpoint's run, and those that it came from, have not had.
    """
    path, manifest = _find_weights(source, root, report, wants_checkpoint=skip_seen)
    options: dict[str, Any] = {"from": str(path)}
    if manifest is not None:
        options["seen"] = manifest.facts.get("seen", [])
    if skip_seen:
        if manifest is None:
            raise SpecError(
                f"--skip-seen asks which samples {source!r} was trained on, which only a checkpoint knows; name a "
                "run that was trained with --checkpoint, or RUN@STEP."
            )
        options["skip_seen"] = True
    return options


def _find_weights(
    source: str, root: str | Path, report: Report, *, wants_checkpoint: bool
) -> tuple[Path, Manifest | None]:
    if Path(source).is_file():
        return Path(source).absolute(), None
    if not names_checkpoint(source) and not wants_checkpoint:
        folder = RunFolder.open(source, root)
        if folder.model.is_file():
            return folder.model, None
        if not step_folders(folder.checkpoints):
            raise CheckpointError(folder.explain_no_model())
    return find_whole(source, root, report)
