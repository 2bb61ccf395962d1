"""The arguments of a fold, of a scatter and of a gather as one value each, and their launches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton

from kda_kernels._gluon.commit import fold_gluon_kernel
from kda_kernels._launch import launch, pitch
from kda_kernels._replay import Ticket, remember
from kda_kernels._triton.commit import fold_kernel, scatter_kernel
from kda_kernels._triton.gather import gather_kernel
from kda_kernels.buffers import Ring
from kda_kernels.defaults import default_fold_config
from kda_kernels.shapes import KdaShape, LaunchConfig

SCATTER_BYTES = 8192
"""Per program."""

SCATTER_NUM_WARPS = 4

GATHER_CHANNELS = 1024
"""Per program, at most: 16 bytes of each column for each thread."""


class FoldCall(NamedTuple):
    """The arguments of `fold`."""

    ssm_state: torch.Tensor
    ring: Ring
    shape: KdaShape
    slots: torch.Tensor
    accept_lens: torch.Tensor
    draft_tokens: int
    track_slots: torch.Tensor | None
    track_steps: torch.Tensor | None
    config: LaunchConfig | None
    errors: torch.Tensor | None
    starts: torch.Tensor | None

    def launch(self, ticket: Ticket | None) -> None:
        """Launch this call, which was accepted, and remember it."""
        ssm_state, ring, shape = self.ssm_state, self.ring, self.shape
        batch, limit = self.slots.shape[0], min(self.draft_tokens, ring.length)
        config = self.config or default_fold_config(limit, ssm_state.device)
        block_v = min(config.block_v, shape.head_v_dim)
        kernel: Any = fold_kernel
        layout: dict[str, Any] = {}
        if config.rows_per_thread is not None:
            kernel, layout = fold_gluon_kernel, {
                "TOKENS": max(2, triton.next_power_of_2(limit)), "ROWS_PER_THREAD": config.rows_per_thread,
                "WARPS": config.num_warps,
            }  # fmt: skip
        launched = launch(
            kernel,
            ssm_state.shape[0] * batch * shape.num_v_heads * (shape.head_v_dim // block_v),
            (
                *_pitched(ssm_state), *_pitched(ring.raw_v), *_pitched(ring.raw_k),
                *_pitched(ring.g), *_pitched(ring.beta),
                self.slots, self.accept_lens, self.track_slots, self.track_steps, self.errors,
                ssm_state.shape[1], batch, limit, self.starts, None if self.starts is None else self.draft_tokens,
            ),
            device=ssm_state.device, num_warps=config.num_warps, pdl=config.pdl, max_registers=config.max_registers,
            L=ring.length, H=shape.num_heads, HV=shape.num_v_heads, K=shape.head_k_dim, V=shape.head_v_dim,
            BLOCK_V=block_v, HAS_TRACK=self.track_slots is not None, COUNT=self.errors is not None, **layout,
        )  # fmt: skip
        if ticket is not None:
            names = ("ssm_state", "slots", "accept_lens", "track_slots", "track_steps", "errors", "starts")
            remember(ticket, [name for name in names if getattr(self, name) is not None], [(launched, {})])


class ScatterCall(NamedTuple):
    """The arguments of `prepare_scatter`."""

    dst: torch.Tensor
    src: torch.Tensor
    names: tuple[str, str]
    slots: torch.Tensor
    accept_lens: torch.Tensor | None
    draft_tokens: int
    rows: torch.Tensor | None
    track_slots: torch.Tensor | None
    track_steps: torch.Tensor | None
    errors: torch.Tensor | None
    pdl: bool | None
    last_steps: torch.Tensor | None
    starts: torch.Tensor | None
    parents: torch.Tensor | None

    def launch(self, ticket: Ticket | None) -> None:
        """Launch this call, which was accepted, and remember it."""
        dst, src, batch = self.dst, self.src, self.slots.shape[0]
        ends = self.accept_lens if self.last_steps is None else self.last_steps
        entry, block = math.prod(dst.shape[2:]), SCATTER_BYTES // dst.element_size()
        launched = launch(
            scatter_kernel,
            dst.shape[0] * batch * -(-entry // block),
            (
                *_pitched(dst), *_pitched(src),
                self.slots, self.rows, ends, self.track_slots, self.track_steps, self.errors,
                dst.shape[1], src.shape[1], batch, self.draft_tokens, self.starts, self.parents,
            ),
            device=dst.device, num_warps=SCATTER_NUM_WARPS, pdl=self.pdl,
            N=entry, BLOCK_N=block, LAST_STEPS=self.last_steps is not None,
            T=None if self.parents is None else self.draft_tokens, HAS_ROWS=self.rows is not None,
            HAS_TRACK=self.track_slots is not None, COUNT=self.errors is not None,
        )  # fmt: skip
        if ticket is not None:
            optional = ("rows", "track_slots", "track_steps", "errors", "starts", "parents")
            given = [name for name in optional if getattr(self, name) is not None]
            remember(ticket, ["dst", "src", "slots", "accept_lens", *given], [(launched, {})])


class GatherCall(NamedTuple):
    """The arguments of `gather_conv`."""

    conv_state: torch.Tensor
    kept_inputs: torch.Tensor
    slots: torch.Tensor
    accept_lens: torch.Tensor
    draft_tokens: int
    starts: torch.Tensor | None
    track_slots: torch.Tensor | None
    track_steps: torch.Tensor | None
    errors: torch.Tensor | None
    pdl: bool | None

    def launch(self, ticket: Ticket | None) -> None:
        """Launch this call, which was accepted, and remember it."""
        conv_state, batch, d = self.conv_state, self.slots.shape[0], self.conv_state.shape[-1]
        block = min(GATHER_CHANNELS, d & -d)  # the largest power of two that divides D, a multiple of 64
        launched = launch(
            gather_kernel,
            conv_state.shape[0] * batch * (d // block),
            (
                *_pitched(conv_state), self.kept_inputs,
                self.slots, self.accept_lens, self.track_slots, self.track_steps, self.errors,
                conv_state.shape[1], batch, self.draft_tokens, self.starts,
            ),
            device=conv_state.device, num_warps=SCATTER_NUM_WARPS, pdl=self.pdl,
            D=d, BLOCK_D=block, HAS_TRACK=self.track_slots is not None, COUNT=self.errors is not None,
        )  # fmt: skip
        if ticket is not None:
            optional = ("starts", "track_slots", "track_steps", "errors")
            given = [name for name in optional if getattr(self, name) is not None]
            remember(ticket, ["conv_state", "kept_inputs", "slots", "accept_lens", *given], [(launched, {})])


def _pitched(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A tensor of all layers with its layer and slot (or row) pitch, as kernels take it."""
    return tensor, pitch(tensor, 0), pitch(tensor, 1)
