"""Ranks that ``torchrun`` started this command in, and the process group over them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What ``torchrun`` sets in every process."""


@dataclass(frozen=True)
class Ranks:
    """This process among ``world`` ranks; ``local`` counts on its own machine and picks the GPU."""

    rank: int
    world: int
    local: int

    @property
    def reports(self) -> bool:
        """Whether this is the rank that prints."""
        return self.rank == 0


def started_ranks(environment: Mapping[str, str] = os.environ) -> Ranks | None:
    """The ranks that ``torchrun`` started, or None for a process of its own (also if it is the only rank).

    Raises ``ValueError`` for a number that is none.
    """
    if any(name not in environment for name in VARIABLES):
        return None
    numbers = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not environment[name].isdecimal():
            raise ValueError(f"{name} must be a whole number, got {environment[name]!r}")
        numbers.append(int(environment[name]))
    ranks = Ranks(*numbers)
    if ranks.rank >= max(ranks.world, 1):
        raise ValueError(f"RANK must be below WORLD_SIZE={ranks.world}, got {ranks.rank}")
    return ranks if ranks.world > 1 else None


@contextmanager
def connected(ranks: Ranks | None, device: str) -> Iterator[None]:
    """The default process group while in here: gloo on a CPU, NCCL on GPUs. None: nothing."""
    if ranks is None:
        yield
        return
    import torch
    import torch.distributed as dist

    if device == "cpu":
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device(device))
    try:
        yield
    finally:
        dist.destroy_process_group()
