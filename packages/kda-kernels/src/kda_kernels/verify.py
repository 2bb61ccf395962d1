"""Verify a chain of draft tokens on one KDA layer: the fused lane, and the unfused pair with the same signature."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kda_kernels import checks
from kda_kernels._gluon.verify import verify_gluon_kernel
from kda_kernels._launch import Launched, contracts_conv, current_target, launch, pitch
from kda_kernels._replay import Ticket
from kda_kernels._triton.verify import conv_kernel, verify_kernel
from kda_kernels._verify_call import VerifyCall, replay
from kda_kernels.buffers import LayerParams, LayerState, PendingFold, Ring, Snapshots, common_rows
from kda_kernels.checking import checks_calls, refuse
from kda_kernels.defaults import default_verify_config
from kda_kernels.shapes import PDL_ARCH, KdaShape, LaunchConfig

CONV_BLOCK_CHANNELS = 128
CONV_NUM_WARPS = 4

UNOWNED_ROWS = 16
"""Rows of a ragged batch for each program that zeroes those of no request."""


def verify_fused(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    shape: KdaShape,
    params: LayerParams,
    state: LayerState,
    record: Ring | Snapshots,
    slots: torch.Tensor,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    form: str = "recurrent",
    indices_ready: bool = False,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    pending: PendingFold | None = None,
) -> torch.Tensor:
    """Verify T draft tokens of B requests in one kernel: conv, SiLU, gates, l2-norm, delta rule, record, windows.

    Reads ``state.conv_state`` and ``state.ssm_state``, never writes them (but see ``pending``). Writes the output,
    ``state.conv_window`` or ``state.kept_inputs``, and the record: ring records 0..min(T, L)-1 of each slot, or each
    token's state snapshot.
    Bit-identical to `verify_unfused` and, token by token, to ``draft_tokens=1``.

    On a CUDA device a call with the same groups (params, state, record) as an earlier one, and with other arguments
    that are alike, is recognised and launched without checking it again: build the groups once.

    Args:
        mixed_qkv: [B*T, D] bf16 or fp16, channels q (H*K) | k (H*K) | v (HV*V), before the conv. The row stride is
            free. Request-major: row ``i*T + t`` is token t of batch position i; token 0 is the root (bonus) token.
        a: [B*T, HV*K], raw gate input, dtype of mixed_qkv; row stride free.
        b: [B*T, HV], raw beta logit, dtype of mixed_qkv; row stride free.
        shape: head layout.
        params: the layer's conv weights and gate parameters.
        state: the layer's slot state and conv windows.
        record: a `Ring` (ring mode) or `Snapshots` (snapshot mode) of the layer.
        slots: [B] int32 or int64, slot of each batch position. -1 is padding: zero output rows, nothing else touched.
            A value outside the pool is refused if the tensor is on the CPU; met on the device, the row is treated as
            padded and counted in ``errors``.
        draft_tokens: T >= 1, the root token included.
        rows: [B] row of conv_window and snapshots for each batch position; None means 0..B-1.
        config: launch configuration; any gives the same bits.
        errors: counters from `new_error_counts`, or None to not count.
        out: [B*T, HV, V] to write into, or None to allocate it.
        workspace: [B*T, D] for the conv output of the unfused pair, which allocates it if None; unused here.
        form: "recurrent", or "chunked" (ring mode, T <= 16): the state is only read, once, for all T tokens. Chunked
            outputs are within rounding of the recurrent form's, not bit-identical to token-by-token decode; its ring
            records, hence the committed state, are.
        indices_ready: the caller declares that the kernel launched just before this one on the stream does not write
            ``slots``, ``rows``, ``starts`` and ``parents``. They are then read before the wait of programmatic
            dependent launch.
        starts, parents: None; ragged batches and trees are for `verify_unfused`.
        pending: fold on verify, with a `Ring` of two banks (see `PendingFold`): what is pending in a slot is first
            replayed into its ``state.ssm_state``, unless an earlier verify or flush did so already, and the tokens'
            records go to the other bank. Commit with `advance` in place of `fold`. A slot whose bookkeeping is out of
            range is treated as padded and counted as an accept length.

    Returns:
        [B*T, HV, V] in mixed_qkv's dtype; rows of padded positions are exactly 0.

    Raises:
        ValueError: an argument is refused; the message is that of `checks.verify_reason`.
        TypeError: an argument is of the wrong class.

    Formula: Kimi Linear (arXiv 2510.26692), KDA in recurrent form; the order of operations is in docs/arithmetic.md.
    """
    call = (
        mixed_qkv, a, b, shape, params, state, record, slots, draft_tokens, rows, config, errors, out, workspace,
        form, indices_ready, True, pending, starts, parents,
    )  # fmt: skip
    replayed, ticket = replay(call)
    return _verify(VerifyCall(*call), ticket) if replayed is None else replayed


def verify_unfused(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    shape: KdaShape,
    params: LayerParams,
    state: LayerState,
    record: Ring | Snapshots,
    slots: torch.Tensor,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    form: str = "recurrent",
    indices_ready: bool = False,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    pending: PendingFold | None = None,
) -> torch.Tensor:
    """`verify_fused` in two kernels: the causal-conv update (SiLU, windows), then the gated delta-rule recurrence.

    Arguments, result and errors are those of `verify_fused`, and two more. mixed_qkv is taken as it is: no transposed
    copies. A ragged batch or a tree is verified by the portable kernels, with the bits that each request, or each path
    from the root to a leaf, has as a chain of its own.

    Args:
        starts: [B+1] int32 or int64, cumulative token offsets of a ragged batch. Request i's tokens are rows
            ``starts[i]`` to ``starts[i + 1] - 1`` of mixed_qkv, a, b and out, which have N rows, as many as one likes;
            its length is 0..``draft_tokens``. Ring records, window entries and snapshots past its length are left
            alone. Rows that belong to no request get exactly 0, whatever their input. A range that is negative, too
            long or outside 0..N is refused if the tensor is on the CPU; met on the device, the request is treated as
            padded, its rows as nobody's, and it is counted in ``errors``. Should that make two requests' ranges
            overlap, rows in both get either's output.
        parents: [B, T] int32 or int64, with `Snapshots` and in the recurrent form: the step that token t follows, less
            than t; -1 for the committed state, as of the root. A token's conv inputs are its ancestors', its window and
            snapshot those after its own path. With ``starts``, entries past a request's length mean nothing. Any other
            parent is refused if the tensor is on the CPU; met on the device, the request is treated as padded and
            counted.
    """
    call = (
        mixed_qkv, a, b, shape, params, state, record, slots, draft_tokens, rows, config, errors, out, workspace,
        form, indices_ready, False, pending, starts, parents,
    )  # fmt: skip
    replayed, ticket = replay(call)
    return _verify(VerifyCall(*call), ticket) if replayed is None else replayed


def _verify(call: VerifyCall, ticket: Ticket | None) -> torch.Tensor:
    """Check a call, launch its kernels and remember them."""
    checked = checks_calls()
    if checked:
        refuse(checks.verify_reason(**call.arguments(), fused=call.fused))
    out, workspace = call.out, call.workspace
    if out is None:
        out = call.mixed_qkv.new_empty(call.mixed_qkv.shape[0], call.shape.num_v_heads, call.shape.head_v_dim)
    if call.fused:
        launched = [(_launch_verify(call, call.mixed_qkv, out), {"x": "mixed_qkv"})]
    else:
        if workspace is None:
            workspace = call.mixed_qkv.new_empty(call.mixed_qkv.shape)
        launched = [
            (_launch_conv(call, workspace), {"x": "mixed_qkv", "y": "workspace"}),
            (_launch_verify(call, workspace, out), {"x": "workspace"}),
        ]
    if checked and ticket is not None:
        call.remember(ticket, out, None if call.fused else workspace, launched)
    return out


def _launch_conv(call: VerifyCall, y: torch.Tensor) -> Launched | None:
    x, params, state = call.mixed_qkv, call.params, call.state
    d = call.shape.conv_dim
    block_d = min(CONV_BLOCK_CHANNELS, d & -d)  # the largest power of two that divides D, a multiple of 64
    return launch(
        conv_kernel,
        call.slots.shape[0] * (d // block_d),
        (
            x, pitch(x),
            params.conv_weight, params.conv_bias,
            state.conv_state, pitch(state.conv_state),
            *_window_arguments(state),
            y, call.slots, call.rows,
            state.conv_state.shape[0], common_rows(state, call.record),
            call.starts, call.parents, None if call.starts is None else x.shape[0],
        ),
        device=x.device, num_warps=CONV_NUM_WARPS, pdl=call.config.pdl if call.config else None,
        T=call.draft_tokens, D=d, BLOCK_D=block_d, HAS_BIAS=params.conv_bias is not None,
        CONTRACT=contracts_conv(x.device), HAS_ROWS=call.rows is not None, INDICES_READY=call.indices_ready,
    )  # fmt: skip


def _launch_verify(call: VerifyCall, x: torch.Tensor, out: torch.Tensor) -> Launched | None:
    """Launch the fused kernel on mixed_qkv, or the recurrence on the conv kernel's output."""
    shape, params, state, fused = call.shape, call.params, call.state, call.fused
    config = call.config or default_verify_config(
        shape, call.slots.shape[0], call.draft_tokens, x.device, form=call.form,
        chains=call.starts is None and call.parents is None, fused=fused, pending=call.pending is not None,
    )  # fmt: skip
    block_v = min(config.block_v, shape.head_v_dim)
    ring = call.record if isinstance(call.record, Ring) else None
    snapshots = None if isinstance(call.record, Ring) else call.record.states
    kernel: Any = verify_kernel
    layout: dict[str, Any] = {}
    if config.rows_per_thread is not None:
        prefetches = current_target(x.device)[1] >= PDL_ARCH
        in_blocks = config.token_blocks and call.form == "chunked"
        kernel, layout = verify_gluon_kernel, {
            "ROWS_PER_THREAD": config.rows_per_thread, "WARPS": config.num_warps, "STATE_FIRST": config.state_first,
            "PREFETCH": config.prefetch and prefetches, "TOKEN_BLOCKS": in_blocks,
            "STATE_LAST": in_blocks and prefetches and not config.state_first and call.pending is None,
        }  # fmt: skip
    programs = call.slots.shape[0] * shape.num_v_heads * (shape.head_v_dim // block_v)
    if call.starts is not None:
        programs += triton.cdiv(x.shape[0], UNOWNED_ROWS)  # for the rows that belong to no request
    return launch(
        kernel,
        programs,
        (
            x, pitch(x),
            params.conv_weight if fused else None, params.conv_bias if fused else None,
            state.conv_state if fused else None, pitch(state.conv_state),
            *(_window_arguments(state) if fused else (None, _window_pitch(state), None)),
            call.a, pitch(call.a), call.b, pitch(call.b),
            params.A_log, params.dt_bias, 0.0 if params.lower_bound is None else float(params.lower_bound),
            state.ssm_state, pitch(state.ssm_state),
            snapshots, 0 if snapshots is None else pitch(snapshots),
            *_ring_arguments(ring),
            out, call.slots, call.rows, call.errors,
            state.ssm_state.shape[0], common_rows(state, call.record), float(params.scale_for(shape)),
            *(() if layout else _batch_arguments(call)),
            *_pending_arguments(call.pending),
        ),
        device=x.device, num_warps=config.num_warps, pdl=config.pdl, max_registers=config.max_registers,
        T=call.draft_tokens, L=ring.length if ring else 0,
        H=shape.num_heads, HV=shape.num_v_heads, K=shape.head_k_dim, V=shape.head_v_dim, BLOCK_V=block_v,
        FUSED=fused, RING=ring is not None, HAS_BIAS=fused and params.conv_bias is not None,
        SAFE_GATE=params.lower_bound is not None, CONTRACT=contracts_conv(x.device),
        HAS_ROWS=call.rows is not None, COUNT=call.errors is not None, CHUNKED=call.form == "chunked",
        # Unfused, the kernel before is the conv kernel, which writes no index.
        INDICES_READY=call.indices_ready or not fused, **layout,
    )  # fmt: skip


def _window_pitch(state: LayerState) -> int | None:
    return None if state.conv_window is None else pitch(state.conv_window)


def _window_arguments(state: LayerState) -> tuple[torch.Tensor | int | None, ...]:
    """The conv windows and their row pitch, and what is kept where there are none, in the kernels' order."""
    return state.conv_window, _window_pitch(state), state.kept_inputs


def _batch_arguments(call: VerifyCall) -> tuple[torch.Tensor | int | None, ...]:
    """What only ragged and tree batches have, in the kernel's order."""
    if call.starts is None:
        return None, call.parents, None, None
    return call.starts, call.parents, call.slots.shape[0], call.mixed_qkv.shape[0]


def _pending_arguments(pending: PendingFold | None) -> tuple[torch.Tensor | int | None, ...]:
    """The tensors of pending folds and the slot pitch of the last, in the kernels' order."""
    if pending is None:
        return (None,) * 5
    return pending.parity, pending.pending, pending.epoch, pending.folded, pitch(pending.folded)


def _ring_arguments(ring: Ring | None) -> tuple[torch.Tensor | int | None, ...]:
    """Each ring tensor and its slot pitch, in the kernel's order."""
    if ring is None:
        return (None, 0) * 4
    return tuple(v for t in (ring.raw_v, ring.raw_k, ring.g, ring.beta) for v in (t, pitch(t)))
