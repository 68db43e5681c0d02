"""`shoal federated`: a server for clients from outside, and such a client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.arguments import FactoryArguments, parse_arguments
from shoal.observe.wording import plural

federated = typer.Typer(
    no_args_is_help=True,
    help="""Train with clients from outside, whose data stays with them.

    [dim]shoal federated serve task.py --ticket ticket
    shoal federated join ticket mine.py[/dim]""",
)


@federated.command()
def serve(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="path.py:factory, for its model and test set.", show_default=False),
    ],
    ticket: Annotated[Path, typer.Option(help="The file to write what clients need into.")] = Path("ticket"),
    out: Annotated[Path, typer.Option(help="The folder for the model.")] = Path("federated"),
    at: Annotated[
        str, typer.Option(help="Where to listen; * for any free port.", metavar="tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:*",
    versions: Annotated[int, typer.Option(help="After so many versions all is over.", min=1)] = 100,
    steps: Annotated[int, typer.Option(help="Steps of a client at a time.", min=1)] = 10,
    buffer: Annotated[int, typer.Option(help="So many differences make a version.", min=1)] = 1,
    oldest: Annotated[int, typer.Option(help="Who began from an older version is left out.", min=0)] = 10,
    clip: Annotated[float, typer.Option(help="How long a difference may be; 0: as long as it is.", min=0)] = 0.0,
    rate: Annotated[float, typer.Option(help="How far to go along the mean of differences.")] = 1.0,
    arg: FactoryArguments = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest version in --out.")] = False,
) -> None:
    """Hold a model for clients from outside, and merge how far they come.

    A client needs a copy of the ticket and a task that makes the same model.

    [dim]shoal federated serve task.py --at tcp://10.0.0.1:7000 --buffer 4 --versions 200[/dim]
    """
    from shoal.federated.server import serve as serve_clients
    from shoal.ps.plain.merging import Merging

    serve_clients(
        target,
        ticket,
        folder=out,
        address=at,
        versions=versions,
        steps=steps,
        merging=Merging(buffer=buffer, oldest=oldest, clip=clip or None, rate=rate),
        args=parse_arguments(arg or ()),
        resume=resume,
        tell=_tell,
    )


@federated.command()
def join(
    ticket: Annotated[
        Path,
        typer.Argument(metavar="TICKET", help="The file that the server wrote, or a copy.", show_default=False),
    ],
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="path.py:factory, the same model with data of your own.", show_default=False
        ),
    ],
    arg: FactoryArguments = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without an answer until this client gives up.", min=1)
    ] = 60.0,
) -> None:
    """Train a model on data of your own for a server elsewhere, until that has had enough.

    The server gets how far the parameters have come, and none of the data.

    [dim]shoal federated join ticket mine.py[/dim]
    """
    from shoal.federated.client import take_part

    brought = take_part(target, ticket, args=parse_arguments(arg or ()), timeout_s=timeout, tell=_tell)
    _tell(f"it is over; this client has brought {plural(brought, 'difference')}")


def _tell(text: str) -> None:
    print(text, flush=True)
