"""What loggers have kept of a run, read with each one's own reader."""

from __future__ import annotations

import csv
import json
import os
import struct
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.loggers import LoggedRun, Logger, LoggerSink
from shoal.observe.run_folder import RunFolder


@dataclass
class Found:
    """What a reader finds."""

    runs: set[str] = field(default_factory=set)
    """By the names that their keeper knows them by."""
    name: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    """By name: `(step, value)`, in order of steps, and of time where a step was told twice."""
    notes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    pictures: dict[str, bytes] = field(default_factory=dict)
    model: bytes = b""
    digest: str = ""


def sink_of(name: str, logger: Logger, folder: RunFolder, settings: dict[str, Any] | None = None) -> LoggerSink:
    """What tells this logger of the run in `folder`."""
    run = LoggedRun(name=folder.name, folder=folder.logged / name, settings=settings or {})
    return LoggerSink(name, logger, run, folder)


def png(grey: int) -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes([0, grey]))) + chunk(b"IEND", b"")


def read_csv(folder: Path) -> Found:
    """`csv`'s tables."""

    def rows(name: str) -> list[dict[str, str]]:
        with (folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    found = Found(runs={str(folder)})
    found.settings = {row["name"]: row["value"] for row in rows("settings.csv")}
    found.name = found.settings.pop("run")
    for row in rows("metrics.csv"):
        found.scalars[row["name"]].append((int(row["step"]), float(row["value"])))
    for row in rows("notes.csv"):
        found.notes[row["name"]].append(row["text"])
    found.pictures = {
        name: Path(texts[-1]).read_bytes() for name, texts in found.notes.items() if texts[-1].endswith(".png")
    }
    if "model" in found.notes:
        found.model = Path(found.notes["model"][-1]).read_bytes()
        found.digest = found.notes["digest"][-1]
    return found


def read_tensorboard(folder: Path) -> Found:
    """TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()
    found, tags = Found(runs={str(folder)}), board.Tags()
    for tag in tags["scalars"]:
        found.scalars[tag] = [(one.step, one.value) for one in board.Scalars(tag)]
    for tag in tags["tensors"]:
        found.notes[tag] = [one.tensor_proto.string_val[0].decode() for one in board.Tensors(tag)]
    found.pictures = {tag: board.Images(tag)[-1].encoded_image_string for tag in tags["images"]}
    table = [line[2:-2].split(" | ", 1) for line in found.notes["settings"][-1].splitlines()[2:]]
    found.settings = {row[0]: row[1] for row in table}
    found.name = found.settings.pop("run")
    if "model" in found.notes:
        path, found.digest = found.notes["model"][-1].split("\n\n")
        found.model = Path(path).read_bytes()
    return found


def read_wandb(folder: Path) -> Found:
    """What W&B has written offline, by a process of its own: a file for each time that the run went on."""
    deadline = time.monotonic() + 60
    while not (files := _wandb_files(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return _read_wandb(files)


def _wandb_files(folder: Path) -> list[Path]:
    """All of a run, once that process has written each to its end."""
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    kinds = [{record.WhichOneof("record_type") for record in _wandb_records(path)} for path in files]
    return files if all("exit" in one for one in kinds) else []


def _read_wandb(files: list[Path]) -> Found:
    found = Found()
    for path in files:
        for record in _wandb_records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    found.runs.add(record.run.run_id)
                    found.name = record.run.display_name
                    found.settings |= {name: str(one) for name, one in _items(record.run.config.update).items()}
                case "history":
                    _add_history(found, _items(record.history.item), path.parent / "files")
                case "summary":
                    found.digest = _items(record.summary.update).get("digest", found.digest)
                case "artifact":
                    assert record.artifact.type == "model"
                    found.digest = json.loads(record.artifact.metadata)["digest"]
                    (entry,) = record.artifact.manifest.contents
                    found.model = Path(entry.local_path).read_bytes()
    for curve in found.scalars.values():
        curve.sort(key=lambda point: point[0])
    return found


def _wandb_records(path: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    for data in _wandb_messages(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def _wandb_messages(path: Path) -> Iterator[bytes]:
    try:
        from wandb.sdk.internal.datastore import DataStore
    except ImportError:
        yield from _log_messages(path.read_bytes())
        return
    store = DataStore()
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        yield data
    store.close()


def _log_messages(data: bytes) -> Iterator[bytes]:
    """What lies in blocks, as in a log of LevelDB: newer versions of W&B have no reader in Python."""
    block, header = 32768, struct.Struct("<IHB")
    at, message = header.size, b""
    while at + header.size <= len(data):
        if (room := block - at % block) < header.size:
            at += room
            continue
        _, size, kind = header.unpack_from(data, at)
        at += header.size + size
        message += data[at - size : at]
        if kind in (1, 4):  # a whole message, or the last part of one
            yield message
            message = b""


def _items(items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in items:
        name, *inside = [item.key] if item.key else item.nested_key
        if inside:  # a picture is told of in several items
            found.setdefault(name, {})["/".join(inside)] = json.loads(item.value_json)
        else:
            found[name] = json.loads(item.value_json)
    return found


def _add_history(found: Found, row: dict[str, Any], files: Path) -> None:
    step = row.pop("step")
    for name, value in row.items():
        if isinstance(value, dict):
            found.pictures[name] = (files / value["path"]).read_bytes()
        elif isinstance(value, str):
            found.notes[name].append(value)
        elif not name.startswith("_"):
            found.scalars[name].append((step, value))


def read_mlflow(folder: Path, uri: str) -> Found:
    """What MLflow has of the one experiment that the environment names."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(os.environ["MLFLOW_EXPERIMENT_NAME"])
    runs = client.search_runs([experiment.experiment_id])
    run_id, found = runs[0].info.run_id, Found(runs={run.info.run_id for run in runs})
    found.name, found.settings = runs[0].info.run_name, dict(runs[0].data.params)
    for name in runs[0].data.metrics:
        history = client.get_metric_history(run_id, name)
        ordered = sorted(history, key=lambda one: (one.step, one.timestamp))
        found.scalars[name] = [(one.step, one.value) for one in ordered]
    for tag, text in sorted(runs[0].data.tags.items()):
        if not tag.startswith("mlflow."):
            found.notes[tag.rpartition(".")[0]] += text.split("\n")
    found.digest = runs[0].data.tags.get("digest", "")
    for plot in client.list_artifacts(run_id, "plots"):
        (file,) = client.list_artifacts(run_id, plot.path)
        content = Path(client.download_artifacts(run_id, file.path)).read_bytes()
        found.pictures[plot.path.removeprefix("plots/")] = content
    for file in client.list_artifacts(run_id, "model"):
        found.model = Path(client.download_artifacts(run_id, file.path)).read_bytes()
    return found
