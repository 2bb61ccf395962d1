"""Is this machine's GPU free to be measured? ``python -m benchmarks.idle`` exits with 1 where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

MOST_UTILIZATION = 5
"""Per cent in any sample: an idle GPU shows 0."""

MOST_MEMORY = 2048
"""MiB in use: drivers keep some hundred for themselves."""

SAMPLES, INTERVAL = 3, 1.0
"""Samples of the utilization, and seconds between them."""


class CannotTell(OSError):
    """nvidia-smi is missing or failed."""


def _query(what: str) -> list[list[str]]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise CannotTell("there is no nvidia-smi on the PATH, so nobody can say whether the GPU is free")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = [f"--id={visible}"] if visible else []
    done = subprocess.run(
        [tool, f"--query-{what}", "--format=csv,noheader,nounits", *only], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotTell(f"nvidia-smi failed with exit code {done.returncode}: {(done.stdout + done.stderr).strip()}")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def reasons() -> list[str]:
    """Why the visible GPUs are busy, a sentence each; nothing where they are free. Takes `SAMPLES` seconds.

    Raises:
        CannotTell: nvidia-smi is missing or failed.
    """
    found = [f"process {pid} ({name}) is on the GPU" for pid, name in _query("compute-apps=pid,process_name")]
    for sample in range(SAMPLES):
        if sample:
            time.sleep(INTERVAL)
        for index, utilization, memory in _query("gpu=index,utilization.gpu,memory.used"):
            if utilization.isdigit() and int(utilization) > MOST_UTILIZATION:
                found.append(f"GPU {index} is {utilization} % busy, at most {MOST_UTILIZATION} % are taken for idle")
            if memory.isdigit() and int(memory) > MOST_MEMORY:
                found.append(f"GPU {index} has {memory} MiB in use, at most {MOST_MEMORY} are taken for idle")
    return list(dict.fromkeys(found))


def main() -> None:
    """The command: exit code 0 where the GPU is free, 1 where it is busy, 2 where nobody can say."""
    try:
        busy = reasons()
    except CannotTell as error:
        sys.stderr.write(f"benchmarks.idle: {error}\n")
        sys.exit(2)
    for reason in busy:
        sys.stderr.write(f"busy: {reason}\n")
    if busy:
        sys.exit(1)
    sys.stdout.write("the GPU is free\n")


if __name__ == "__main__":
    main()
