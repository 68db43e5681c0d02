"""`tensorboard`: event files for TensorBoard, by its own package; torch is not needed to write them."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from shoal.observe.disk import writing
from shoal.observe.loggers.base import LoggedRun, Logger, RunEnding, Scalar, require_installed
from shoal.observe.loggers.record_file import RecordFile

_PNG = b"\x89PNG\r\n\x1a\n"


class TensorBoardLogger(Logger):
    """Writes scalars, pictures, and texts: `settings`, `faults`, `model`."""

    def __init__(self, setting: str = "") -> None:
        """`setting`: a folder; default this logger's own in that of the run."""
        require_installed("tensorboard", "tensorboard")
        self._setting = setting

    def begin(self, run: LoggedRun) -> None:
        self._folder = Path(self._setting) if self._setting else run.folder
        self._open()
        table = ["| | |", "|---|---|", f"| run | {run.name} |"]
        table += [f"| {name} | {value} |" for name, value in run.settings.items()]
        self.note("settings", "\n".join(table), 0)

    def log(self, scalars: Sequence[Scalar]) -> None:
        with writing(self._folder):
            # An event for each step, not for each number: whoever reads it has less to do, too.
            by_step = groupby(sorted(scalars, key=attrgetter("step")), key=attrgetter("step"))
            self._file.write([self._scalars(step, list(of_step)) for step, of_step in by_step])

    def note(self, name: str, text: str, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        with writing(self._folder):
            self._write(
                step,
                time.time(),
                tag=name,
                metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
                tensor=TensorProto(
                    dtype=DT_STRING,
                    string_val=[text.encode()],
                    tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
                ),
            )

    def picture(self, name: str, path: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        data = path.read_bytes()
        # The first chunk of a PNG begins with its width and height.
        width, height = struct.unpack(">II", data[16:24]) if data.startswith(_PNG) else (0, 0)
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
        with writing(self._folder):
            self._write(step, time.time(), tag=name, image=image)

    def undo(self, step: int) -> None:
        with writing(self._folder):
            self._file.close()
        self._open(purged_from=step + 1)

    def model(self, path: Path, digest: str, step: int) -> None:
        self.note("model", f"{path}\n\n{digest}", step)

    def end(self, ending: RunEnding) -> None:
        with writing(self._folder):
            self._file.close()

    def _open(self, purged_from: int | None = None) -> None:
        """Begin a file; TensorBoard leaves out what earlier ones say from this step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            # Files are read in the order of their names.
            name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
            self._file = RecordFile(self._folder / name)
            self._file.write([self._record(wall_time=time.time(), file_version="brain.Event:2")])
            if purged_from is not None:
                start = SessionLog(status=SessionLog.START)
                self._file.write([self._record(wall_time=time.time(), step=purged_from, session_log=start)])

    def _scalars(self, step: int, scalars: Sequence[Scalar]) -> bytes:
        values = [self._summary.Value(tag=one.name, simple_value=one.value) for one in scalars]
        return self._record(wall_time=scalars[0].time, step=step, summary=self._summary(value=values))

    def _write(self, step: int, when: float, **value: Any) -> None:
        summary = self._summary(value=[self._summary.Value(**value)])
        self._file.write([self._record(wall_time=when, step=step, summary=summary)])

    def _record(self, **fields: Any) -> bytes:
        record: bytes = self._event(**fields).SerializeToString()
        return record
