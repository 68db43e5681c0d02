"""`shoal submit --on ray`: a run whose supervisor is a job of a Ray cluster, by Ray's own API for jobs."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.errors import Interrupted, LaunchError, SpecError
from shoal.launch.engines.ray_plan import RayWish
from shoal.launch.remote.sources import sources_of

_ANSWER_S = 15.0


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, wish: RayWish) -> None:
        if find_spec("ray") is None:
            raise SpecError("shoal submit: on=ray needs Ray, which is not installed here; pip install shoal[ray].")
        from ray.job_submission import JobSubmissionClient

        try:
            self._client = JobSubmissionClient(wish.address or None)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise LaunchError(_unreached(wish, error)) from None
        self._wish = wish

    def submit(self, target: str, words: Sequence[str], on: str) -> str:
        """Have a task trained; what Ray calls the job. The task's sources travel with it."""
        with tempfile.TemporaryDirectory(prefix="shoal-submit-") as folder:
            target = _copy_sources(target, Path(folder))
            # Of the cluster's own Python, whatever it is called here.
            entry = ["python", "-m", "shoal.cli", "train", target, *words, "--on", on, "--plain"]
            try:
                return str(
                    self._client.submit_job(entrypoint=shlex.join(entry), runtime_env={"working_dir": folder})
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise LaunchError(_unreached(self._wish, error)) from None

    def follow(self, job: str, write: Callable[[str], None]) -> None:
        """Show what a job writes, until it ends; LaunchError where that is not well."""

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job):
                write(text)

        try:
            asyncio.run(tail())
        except KeyboardInterrupt:
            raise Interrupted(f"The job {job} goes on; end it with ray job stop {job}.") from None
        status: Any = self._client.get_job_status(job)
        if status != "SUCCEEDED":
            raise LaunchError(f"The job {job} ended as {status.lower()}; its last lines say why.")


def _copy_sources(target: str, folder: Path) -> str:
    """What the task is made of, in a folder of its own; what it is called there."""
    sources = sources_of(target)
    if sources is None:
        return target
    if sources.objection:
        raise SpecError(f"shoal submit: {sources.objection}")
    for name in sources.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(sources.root / name, folder / name)
    file, colon, factory = target.partition(":")
    if not file.endswith(".py"):
        return target
    return f"{Path(file).absolute().relative_to(sources.root.absolute())}{colon}{factory}"


def _unreached(wish: RayWish, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return (
        f"{wish.shown[:1].upper()}{wish.shown[1:]} takes no jobs: {lines[0]} Name its dashboard, as in --on "
        "ray:http://HEAD:8265."
    )
