"""`shoal export`: take a model elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import arguments as option


def export(
    run: option.SavedModel,
    to: Annotated[
        str,
        typer.Option(
            help="safetensors or torch: the weights; onnx: the computation, too; huggingface: a folder for "
            "from_pretrained.",
            metavar="safetensors|torch|onnx|huggingface",
        ),
    ] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The file or folder to write; default the run's name, here."),
    ] = None,
    trust: option.Trust = False,
) -> None:
    """Write a run's model so that other programs can read it.

    [dim]shoal export demo --to torch --out demo.pt
    shoal export demo@200 --to onnx[/dim]
    """
    from shoal.launch.taking import export as write
    from shoal.observe.wording import near

    print(f"the model is in {near(str(write(run, to, out, trust=trust)))}")
