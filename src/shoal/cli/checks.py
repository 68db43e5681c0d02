"""The doctor's checks. None of them imports torch here: asking torch about a GPU would claim it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shoal.cli import probe
from shoal.errors import ShoalError
from shoal.launch.owner import start_zygote
from shoal.launch.scripts import run_script
from shoal.layout.devices import SMI_FIELDS, read_cpu, read_smi, usable
from shoal.observe.run_folder import DEFAULT_ROOT
from shoal.observe.wording import memory, plural
from shoal.spec import Cluster
from shoal.spec.world import LOOPBACK

MIN_PYTHON, MIN_TORCH = (3, 11), (2, 11)
MIN_MEMORY, MIN_DISK, ROOMY_DISK = 1e9, 50e6, 1e9
MIN_FILES = 1024
EXTRAS = {"matplotlib": "report", "sklearn": "sklearn", "tensorboard": "tensorboard"}
_SMI_TIMEOUT_S = 20


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: str
    """`ok`, `warn` (it works, but) or `fail`."""
    found: str
    advice: str = ""
    """What to do about it."""


def examine() -> list[Check]:
    """Every check, in the order to read them."""
    return [check() for check in _QUICK] + check_processes()


def check_python() -> Check:
    found = platform.python_version()
    if sys.version_info >= MIN_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", found, "Use Python 3.11 or newer.")


def check_torch() -> Check:
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "fail", "not installed", "Install it: pip install torch")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers >= MIN_TORCH:
        return Check("torch", "ok", found)
    return Check("torch", "fail", found, "Install torch 2.11 or newer.")


def check_allocator() -> Check:
    name, version = platform.libc_ver()
    if hasattr(ctypes.CDLL(None), "mallopt") and name == "glibc":
        return Check("allocator", "ok", f"glibc {version} with mallopt")
    advice = "Training works, but gives memory back at every step; a system with glibc is faster."
    return Check("allocator", "warn", f"{name or 'libc'} without mallopt", advice)


def check_shared_memory() -> Check:
    advice = "Use --strategy data:via=backend here."
    if not hasattr(os, "memfd_create"):
        return Check("shared memory", "fail", "this system has no memfd", advice)
    try:
        fd = os.memfd_create("shoal-doctor")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as one, mmap.mmap(fd, mmap.PAGESIZE) as other:
                one[0] = 42
                works = other[0] == 42
        finally:
            os.close(fd)
    except OSError as error:
        return Check("shared memory", "fail", f"memfd is refused ({error.strerror})", advice)
    return Check("shared memory", "ok" if works else "fail", "memfd, mapped twice", "" if works else advice)


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads:
        return Check("cores", "ok", f"{cores}; workers share them out (OMP_NUM_THREADS is not set)")
    found = f"{cores}, with OMP_NUM_THREADS={threads} for each worker"
    if threads.isdigit() and int(threads) <= cores:
        return Check("cores", "ok", found)
    return Check("cores", "warn", found, "Unset OMP_NUM_THREADS: each worker then gets its share of the cores.")


def check_processor() -> Check:
    """What is there for `--fast` to use."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        caches = {str(path): path.read_text(encoding="ascii").strip() for path in folder.glob("index*/size")}
    except OSError as error:
        return Check("processor", "ok", f"nothing is known of it ({error.strerror})")
    return Check("processor", "ok", str(read_cpu(text, caches, len(os.sched_getaffinity(0)))))


def check_compiler() -> Check:
    """What `--compile` needs on CPUs."""
    if (found := shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")) is not None:
        return Check("compiler", "ok", found)
    advice = "Steps cannot be compiled on the CPU (--compile, --fast); install g++ where that is wanted."
    return Check("compiler", "warn", "no C++ compiler", advice)


def check_memory() -> Check:
    state = psutil.virtual_memory()
    found = f"{memory(state.available)} free of {memory(state.total)}"
    if state.available >= MIN_MEMORY:
        return Check("memory", "ok", found)
    return Check("memory", "warn", found, "Each worker needs about 300 MB and its batch; use few workers.")


def check_disk() -> Check:
    folder = Path(DEFAULT_ROOT) if Path(DEFAULT_ROOT).is_dir() else Path.cwd()
    free = shutil.disk_usage(folder).free
    found = f"{memory(free)} free under {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "Start elsewhere, or use --runs.")
    if free < MIN_DISK:
        return Check("disk", "fail", found, "Free some space, or put runs on another disk with --runs.")
    return Check("disk", *(("ok", found) if free >= ROOMY_DISK else ("warn", found, "Large models may not fit.")))


def check_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_FILES:
        return Check("open files", "ok", f"up to {soft}" if soft > 0 else "no limit")
    return Check("open files", "warn", f"up to {soft}", f"For many workers raise it: ulimit -n {min(4096, hard)}")


def check_loopback() -> Check:
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=5):
                return Check("loopback", "ok", f"{LOOPBACK}, port {port} was free")
    except OSError as error:
        advice = "Strategies over sockets will not work; bring the interface lo up."
        return Check("loopback", "fail", f"no connection ({error.strerror})", advice)


def check_gpus() -> Check:
    if shutil.which("nvidia-smi") is None:
        return Check("GPUs", "ok", "none (no nvidia-smi); training uses the CPU")
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("GPUs", "warn", f"nvidia-smi failed ({error})", "Check the driver; training uses the CPU.")
    found, lines = usable(read_smi(answer.stdout))
    told = "; ".join(
        f"{gpu.name}, {memory(gpu.free_bytes or 0)} free of {memory(gpu.total_bytes)}" for gpu in found
    )
    return Check("GPUs", "warn" if lines else "ok", told or "none", "\n".join(f"left out: {one}" for one in lines))


def check_extras() -> Check:
    missing = [extra for module, extra in EXTRAS.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return Check("extras", "ok", ", ".join(EXTRAS.values()))
    found = f"{plural(len(missing), 'extra')} not installed: {', '.join(missing)}"
    return Check("extras", "warn", found, f"Where wanted: pip install 'shoal[{','.join(missing)}]'")


def check_processes() -> list[Check]:
    """Start a zygote, fork from it twice, and let two processes wake each other."""
    with tempfile.TemporaryDirectory(prefix="shoal-doctor-") as folder, start_zygote() as zygote:
        answer, seconds = Path(folder) / "answer.json", []
        try:
            for _ in range(2):
                begin = time.monotonic()
                run_script(probe.__file__, [str(answer)], cluster=Cluster(threads=1), zygote=zygote)
                seconds.append(time.monotonic() - begin)
            told = json.loads(answer.read_text())
        except (ShoalError, OSError) as error:
            advice = "Run `python -c 'import torch'` to see whether torch itself loads."
            return [Check("processes", "fail", str(error), advice)]
    cold_s, warm_s = seconds
    return [
        Check("processes", "ok", f"first worker after {cold_s:.1f} s, the next within {warm_s:.2f} s"),
        Check("futex", "ok", f"another process woke up within {told['wake_s'] * 1e6:.0f} µs"),
        check_accelerator(*told["accelerator"]),
    ]


def check_accelerator(kind: str, number: int) -> Check:
    """What torch can compute on, as it says itself: of other kinds than GPUs with CUDA nothing is used."""
    if not kind:
        return Check("accelerators", "ok", "torch finds none")
    found = f"torch finds {number} x {kind}"
    if kind == "cuda":
        return Check("accelerators", "ok", found)
    advice = f"left out: workers compute on cpu and cuda, and {kind} is neither; use --device cpu."
    return Check("accelerators", "warn", found, advice)


_QUICK: tuple[Callable[[], Check], ...] = (
    check_python,
    check_torch,
    check_allocator,
    check_shared_memory,
    check_cores,
    check_processor,
    check_compiler,
    check_memory,
    check_disk,
    check_files,
    check_loopback,
    check_gpus,
    check_extras,
)
