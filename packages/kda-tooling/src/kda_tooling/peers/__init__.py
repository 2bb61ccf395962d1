"""Other projects' kernels, loaded at run time to be measured and compared beside ours; none of their code is kept here.

A peer is one entry of `PEERS`: a function from a path to an object with the methods of `Peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from kda_kernels import Ring
from kda_tooling.peers.sglang import load_sglang
from kda_tooling.problem import VerifyProblem


class Peer(Protocol):
    """What a peer offers to the comparison."""

    name: str
    version: str

    def verify_arms(self, problem: VerifyProblem) -> dict[str, Callable[[VerifyProblem], torch.Tensor]]:
        """Arm name -> verify function, for every variant that takes ``problem``; ring mode."""
        ...

    def not_taken(self, problem: VerifyProblem) -> dict[str, str]:
        """Arm name -> why the peer cannot run it on ``problem``; empty where it runs everything."""
        ...

    def commit(
        self, ssm_state: torch.Tensor, ring: Ring, conv_state: torch.Tensor, conv_window: torch.Tensor,
        slots: torch.Tensor, accept_lens: torch.Tensor,
    ) -> None:  # fmt: skip
        """Commit all layers' accepted prefixes in place, from the ring and the conv windows."""
        ...


PEERS: dict[str, Callable[[Path], Peer]] = {"sglang": load_sglang}


def load_peer(spec: str) -> Peer:
    """Load the peer of ``NAME=PATH``.

    Raises:
        ValueError: the spec has no ``=``, or no peer has that name.
        FileNotFoundError: the path lacks a file that the peer needs; the message names it.
    """
    name, separator, path = spec.partition("=")
    if not separator or not path:
        raise ValueError(f"peer must be given as NAME=PATH, e.g. sglang=/path/to/unpacked/wheel; got {spec!r}")
    if name not in PEERS:
        raise ValueError(f"peer must be one of {', '.join(sorted(PEERS))}; got {name!r}")
    return PEERS[name](Path(path))
