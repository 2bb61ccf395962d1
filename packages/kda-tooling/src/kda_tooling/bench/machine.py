"""What a measurement was made on: GPU, clocks, driver, versions, commit, and the copy bandwidth that floors use."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
import triton


@dataclass(frozen=True)
class Machine:
    """Header of a measurement.

    Args:
        gpu: device name.
        sm: compute capability, e.g. 90; 0 off CUDA.
        l2_bytes: size of the L2 cache.
        copy_bytes_per_second: bandwidth of a large device-to-device copy, bytes read plus written.
        driver, clocks: as nvidia-smi reports them, or "unknown".
        torch, triton, python: versions.
        commit: git commit of the measured code, with "+changes" for an edited tree; "unknown" outside a checkout.
        date: ISO date of the run.
    """

    gpu: str
    sm: int
    l2_bytes: int
    copy_bytes_per_second: float
    driver: str
    clocks: str
    torch: str
    triton: str
    python: str
    commit: str
    date: str


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def git_commit() -> str:
    """HEAD of the checkout that this file lies in (short), "+changes" where tracked files differ; or "unknown".

    KDA_GIT_SHA in the environment names the commit of a tree that was copied without its .git folder.
    """
    if given := os.environ.get("KDA_GIT_SHA"):
        return given[:12]
    folder = str(Path(__file__).parent)
    tracked = _output("git", "-C", folder, "ls-files", Path(__file__).name)  # an installed copy is not the checkout's
    head = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD") if tracked else None
    if head is None:
        return "unknown"
    dirty = _output("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return f"{head}+changes" if dirty else head


def copy_bandwidth(num_bytes: int = 1 << 31, copies: int = 10) -> float:
    """Bytes per second, read plus written, of ``copies`` device copies of ``num_bytes`` each."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(copies):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 2 * num_bytes * copies / (start.elapsed_time(end) / 1e3)


def describe_machine() -> Machine:
    """The header of a run on the current CUDA device; measures the copy bandwidth, which takes about 0.1 s."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    bandwidth = copy_bandwidth()  # first: an idle GPU has other clocks
    query = _output("nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader", "--id=0")
    driver, sm_clock, memory_clock = (query.split(", ") if query else ["unknown"] * 3)[:3]
    return Machine(
        gpu=properties.name,
        sm=properties.major * 10 + properties.minor,
        l2_bytes=properties.L2_cache_size,
        copy_bytes_per_second=bandwidth,
        driver=driver,
        clocks=f"SM {sm_clock}, memory {memory_clock}",
        torch=torch.__version__,
        triton=triton.__version__,
        python=platform.python_version(),
        commit=git_commit(),
        date=datetime.date.today().isoformat(),
    )
