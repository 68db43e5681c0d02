"""What a run says about itself, and who reads it: terminal, log, files, loggers, report. Nothing imports torch."""

from shoal.observe.bus import Bus, Sink
from shoal.observe.events import Event
from shoal.observe.folder_watch import FolderWatch
from shoal.observe.jsonl import JsonlSink, read_events
from shoal.observe.loggers import Logger, LoggerSink
from shoal.observe.plain import PlainSink
from shoal.observe.progress import ProgressSink
from shoal.observe.report import write_report
from shoal.observe.run_folder import RunFolder
from shoal.observe.summary import RunSummary

__all__ = [
    "Bus",
    "Event",
    "FolderWatch",
    "JsonlSink",
    "Logger",
    "LoggerSink",
    "PlainSink",
    "ProgressSink",
    "RunFolder",
    "RunSummary",
    "Sink",
    "read_events",
    "write_report",
]
