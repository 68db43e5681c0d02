"""What a run says about itself, and who reads it: terminal, log, files, TensorBoard, report.

Nothing here imports torch but `TensorBoardSink`, when it is made.
"""

from shoal.observe.bus import Bus, Sink
from shoal.observe.events import Event
from shoal.observe.folder_watch import FolderWatch
from shoal.observe.jsonl import JsonlSink, read_events
from shoal.observe.plain import PlainSink
from shoal.observe.progress import ProgressSink
from shoal.observe.report import write_report
from shoal.observe.run_folder import RunFolder
from shoal.observe.summary import RunSummary
from shoal.observe.tensorboard import TensorBoardSink

__all__ = [
    "Bus",
    "Event",
    "FolderWatch",
    "JsonlSink",
    "PlainSink",
    "ProgressSink",
    "RunFolder",
    "RunSummary",
    "Sink",
    "TensorBoardSink",
    "read_events",
    "write_report",
]
