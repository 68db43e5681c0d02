"""`shoal checkpoint`: look at what runs have saved, check it, take it elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.arguments import AsJson, Runs, SavedRun
from shoal.cli.json_output import print_json
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.checkpoint.listing import Entry

checkpoint = typer.Typer(
    no_args_is_help=True,
    help="""List, show, check, export and compare what runs save with --checkpoint.

    A checkpoint is written as its folder, as RUN@STEP, or as RUN for its latest.

    [dim]shoal checkpoint ls demo
    shoal checkpoint export demo@200 model.safetensors[/dim]""",
)

Which = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT", help="A checkpoint's folder, RUN@STEP, or RUN for its latest.", show_default=False
    ),
]
RUNS = Path("runs")


@checkpoint.command("ls")
def list_checkpoints(run: SavedRun, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """List a run's checkpoints. Their data is not read; `verify` does that.

    [dim]shoal checkpoint ls demo[/dim]
    """
    from shoal.checkpoint.listing import list_entries
    from shoal.cli.checkpoint_tables import entries_table
    from shoal.observe import RunFolder

    folder = RunFolder.open(run, runs)
    entries = list_entries(folder.checkpoints)
    if as_json:
        print_json({"run": folder.name, "checkpoints": [_plain(entry) for entry in entries]})
    elif entries:
        _show(entries_table(entries))
    else:
        print(f"Run {folder.name} has no checkpoints; train with --checkpoint to get some.")


@checkpoint.command()
def show(
    which: Which,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor, too.")] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds.

    [dim]shoal checkpoint show demo@200
    shoal checkpoint show demo --tensors[/dim]
    """
    from shoal.checkpoint.listing import entry_of, read_manifest
    from shoal.cli.checkpoint_tables import facts_table, tensors_table
    from shoal.observe.checkpoint_names import find_checkpoint

    path = find_checkpoint(which, runs)
    manifest = read_manifest(path)
    entry = entry_of(path, manifest)
    if as_json:
        listed = [{"part": part, **vars(one)} for part, file in manifest.files.items() for one in file.locations]
        print_json({**_plain(entry), "facts": manifest.facts, "tensors": listed})
        return
    _show(facts_table(entry, manifest))
    if tensors:
        print()
        _show(tensors_table(manifest))


@checkpoint.command()
def verify(which: Which, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Read a checkpoint, or all those of a run, and check every byte.

    The exit status is 1 where one is torn.

    [dim]shoal checkpoint verify demo
    shoal checkpoint verify demo@200[/dim]
    """
    from shoal.checkpoint.folder import read_folder
    from shoal.cli.checkpoint_tables import verdict_line
    from shoal.errors import CheckpointError

    problems = {}
    for path in _all_of(which, runs):
        problems[str(path)] = ""
        try:
            read_folder(path)
        except CheckpointError as error:
            problems[str(path)] = str(error)
        if not as_json:
            _show(verdict_line(path, problems[str(path)]))
    torn = any(problems.values())
    if as_json:
        print_json({"whole": not torn, "problems": problems})
    if torn:
        raise typer.Exit(1)


@checkpoint.command()
def export(
    which: Which,
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="The optimizer's state, too, as optimizer/parameter/key.")
    ] = False,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's model as one safetensors file, which everybody can read.

    [dim]shoal checkpoint export demo@200 model.safetensors
    shoal checkpoint export demo state.safetensors --optimizer[/dim]
    """
    if out.suffix != ".safetensors" or not out.absolute().parent.is_dir():
        raise SpecError(f"The file to write must be NAME.safetensors in a folder that exists, found {str(out)!r}.")
    from shoal.checkpoint.folder import read_folder
    from shoal.checkpoint.model_stream import save_tensors
    from shoal.observe.checkpoint_names import find_checkpoint

    found = read_folder(find_checkpoint(which, runs), ["model", "optimizer"] if optimizer else ["model"])
    state = {f"optimizer/{name}": tensor for name, tensor in found.optimizer.items()}
    digest = save_tensors(out.absolute(), {**found.model, **state}, step=str(found.step))
    told = {"out": str(out), "step": found.step, "tensors": len(found.model) + len(state), "digest": digest}
    if as_json:
        print_json(told)
    else:
        print(f"{out}: {told['tensors']} tensors of step {found.step}, digest {digest}")


@checkpoint.command()
def diff(first: Which, second: Which, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Compare the models and optimizer states of two checkpoints, tensor by tensor.

    The exit status is 1 where they differ.

    [dim]shoal checkpoint diff demo@100 demo@200[/dim]
    """
    from shoal.checkpoint.comparing import differences
    from shoal.checkpoint.folder import read_folder
    from shoal.checkpoint.model_file import digest
    from shoal.cli.checkpoint_tables import differences_table
    from shoal.observe.checkpoint_names import find_checkpoint

    one, other = (read_folder(find_checkpoint(text, runs), ["model", "optimizer"]) for text in (first, second))
    digests = digest(one.model), digest(other.model)
    found = [] if digests[0] == digests[1] else list(differences("model", one.model, other.model))
    found += differences("optimizer", one.optimizer, other.optimizer)
    if as_json:
        told = {"equal": not found, "digests": digests, "differences": [asdict(item) for item in found]}
        print_json(told)
    elif found:
        _show(differences_table(found, same_model=digests[0] == digests[1]))
    else:
        print(f"equal: the models (digest {digests[0]}) and the optimizers' states")
    if found:
        raise typer.Exit(1)


def _all_of(which: str, runs: Path) -> list[Path]:
    """One checkpoint, or all those of a run."""
    from shoal.observe import RunFolder
    from shoal.observe.checkpoint_names import find_checkpoint, names_checkpoint, step_folders

    if names_checkpoint(which):
        return [find_checkpoint(which, runs)]
    folder = RunFolder.open(which, runs)
    if not (paths := step_folders(folder.checkpoints)):
        raise SpecError(f"Run {folder.name!r} has no checkpoints in {folder.path}; train with --checkpoint.")
    return paths


def _plain(entry: Entry) -> dict[str, Any]:
    return {**asdict(entry), "path": str(entry.path)}


def _show(what: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(what, soft_wrap=not console.is_terminal)
