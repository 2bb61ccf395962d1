"""Plain-torch reference of verify and commit, on any device: the arithmetic to read, and the lane of last resort.

Same signatures as the kernels. Elementwise parts round where the kernels round (conv products of 16-bit weights,
SiLU outputs, ring records, outputs); sums over K use torch's order, so results agree with the kernels within rounding,
not bit for bit. Intermediates are fp32, or fp64 inside ``reference_precision(torch.float64)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import cast

import torch

from kda_kernels import checks, commit_checks
from kda_kernels._launch import pitch
from kda_kernels.buffers import LayerParams, LayerState, PendingFold, Ring, Snapshots, common_rows
from kda_kernels.checking import refuse
from kda_kernels.errors import ErrorKind
from kda_kernels.reference_chunked import chunked_outputs
from kda_kernels.shapes import KdaShape, LaunchConfig

_precision: ContextVar[torch.dtype] = ContextVar("reference_precision", default=torch.float32)


@contextlib.contextmanager
def reference_precision(dtype: torch.dtype) -> Iterator[None]:
    """Compute the references' intermediates in ``dtype``; what is stored keeps the dtype of its tensor.

    torch rounds fp64 to 16 bits by way of fp32, so a value near a rounding tie can be stored one 16-bit ulp off.

    Raises:
        ValueError: ``dtype`` is neither torch.float32 nor torch.float64.
    """
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    token = _precision.set(dtype)
    try:
        yield
    finally:
        _precision.reset(token)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_precision.get())


def conv_silu(columns: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Causal conv of width 4 and SiLU. columns: [T, 4, D], oldest first; weight: [D, 4] -> [T, D] in columns' dtype."""
    acc = torch.zeros(columns.shape[0], columns.shape[2], dtype=_precision.get(), device=columns.device)
    if bias is not None:
        acc = acc + _wide(bias)
    for tap in range(4):
        product = _wide(columns[:, tap]) * _wide(weight[:, tap])
        # A 16-bit weight's product is rounded to its type; an fp32 weight's is not.
        acc = acc + (product if weight.dtype == torch.float32 else _wide(product.to(weight.dtype)))
    return (acc / (1 + torch.exp(-acc))).to(columns.dtype)


def log_decay(a: torch.Tensor, params: LayerParams, shape: KdaShape) -> torch.Tensor:
    """Per-channel log-decay. a: [T, HV*K] -> [T, HV, K], <= 0."""
    x = (_wide(a) + params.dt_bias).view(-1, shape.num_v_heads, shape.head_k_dim)
    rate = torch.exp(_wide(params.A_log))[:, None]
    if params.lower_bound is not None:
        return params.lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.where(x <= 20.0, torch.log(1.0 + torch.exp(x)), x)


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension."""
    return x * (1.0 / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6))


def delta_step(S: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """One step of the gated delta rule. S: [HV, V, K]; k (normalised), g: [HV, K]; v: [HV, V]; beta: [HV]."""
    S = S * torch.exp(g)[:, None, :]
    u = (v - (S * k[:, None, :]).sum(-1)) * beta[:, None]
    return S + u[:, :, None] * k[:, None, :]


def _count(errors: torch.Tensor | None, kind: ErrorKind) -> None:
    if errors is not None:
        errors[kind] += 1


def usable_slot(slot: int, num_slots: int, errors: torch.Tensor | None) -> bool:
    """Whether a slot is one of the pool's; counted if it is neither that nor -1."""
    if slot < -1 or slot >= num_slots:
        _count(errors, ErrorKind.SLOT)
    return 0 <= slot < num_slots


def _usable_row(row: int, num_rows: int, errors: torch.Tensor | None) -> bool:
    if not 0 <= row < num_rows:
        _count(errors, ErrorKind.ROW)
    return 0 <= row < num_rows


@torch.no_grad()
def verify_reference(
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
    """`kda_kernels.verify_fused` in plain torch; ``config`` and ``workspace`` are checked and otherwise unused."""
    reason = checks.verify_reason(
        mixed_qkv, a, b, shape=shape, params=params, state=state, record=record, slots=slots,
        draft_tokens=draft_tokens, rows=rows, config=config, errors=errors, out=out, workspace=workspace,
        form=form, indices_ready=indices_ready, starts=starts, parents=parents, pending=pending,
        needs_kernels=False,
    )  # fmt: skip
    refuse(reason)
    if out is None:
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], shape.num_v_heads, shape.head_v_dim)
    if state.kept_inputs is not None and len(slots):
        noted = (mixed_qkv.data_ptr(), pitch(mixed_qkv), mixed_qkv.shape[0])
        state.kept_inputs.copy_(torch.tensor(noted, dtype=torch.int64))
    num_rows = common_rows(state, record)
    row_list = range(len(slots)) if rows is None else rows.tolist()
    owned = torch.zeros(mixed_qkv.shape[0], dtype=torch.bool)
    for i, (slot, row) in enumerate(zip(slots.tolist(), row_list, strict=True)):
        tokens = slice(i * draft_tokens, (i + 1) * draft_tokens) if starts is None else _range(starts, i)
        slot_usable = usable_slot(slot, state.ssm_state.shape[0], errors)
        usable = _usable_row(row, num_rows, errors) and slot_usable
        if not _usable_range(tokens, draft_tokens, mixed_qkv.shape[0], errors):
            continue
        length = tokens.stop - tokens.start
        earlier = list(range(-1, length - 1)) if parents is None else parents[i, :length].tolist()
        if not (usable and _usable_parents(earlier, errors)):
            continue
        ring_slot = slot
        if pending is not None and isinstance(record, Ring):
            if not usable_pending(pending, slot, record.length, errors):
                continue
            replay_pending(state.ssm_state, record, pending, slot)
            ring_slot += int(pending.parity[slot]) * state.ssm_state.shape[0]
        owned[tokens] = True
        if length:
            out[tokens] = _verify_request(
                mixed_qkv[tokens], a[tokens], b[tokens], shape, params, state, record, slot, row, earlier, form,
                ring_slot,
            )  # fmt: skip
    out[~owned] = 0
    return out


def _range(starts: torch.Tensor, i: int) -> slice:
    return slice(int(starts[i]), int(starts[i + 1]))


def _usable_range(tokens: slice, most: int, num_tokens: int | None, errors: torch.Tensor | None) -> bool:
    usable = 0 <= tokens.start <= tokens.stop <= tokens.start + most
    usable = usable and (num_tokens is None or tokens.stop <= num_tokens)
    if not usable:
        _count(errors, ErrorKind.LENGTH)
    return usable


def _usable_parents(parents: list[int], errors: torch.Tensor | None) -> bool:
    usable = all(-1 <= parent < t for t, parent in enumerate(parents))
    if not usable:
        _count(errors, ErrorKind.PARENT)
    return usable


def _on_path(parents: list[int], last: int, step: int) -> bool:
    """Whether ``step`` is on the path from a root to the step ``last``."""
    while last > step:
        last = parents[last]
    return last == step


def _paths(parents: list[int]) -> list[list[int]]:
    """For each token the four input columns that end at it on its path: 0, 1, 2 are the conv state's, 3 + t token t's.

    The root's parent, -1, is column 2.
    """
    paths: dict[int, list[int]] = {-1: [-1, 0, 1, 2]}
    for t, parent in enumerate(parents):
        paths[t] = [*paths[parent][1:], 3 + t]
    return [paths[t] for t in range(len(parents))]


def _verify_request(
    x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, shape: KdaShape, params: LayerParams, state: LayerState,
    record: Ring | Snapshots, slot: int, row: int, parents: list[int], form: str, ring_slot: int,
) -> torch.Tensor:  # fmt: skip
    """Verify one request; x: [T, D], a: [T, HV*K], b: [T, HV], parents: of its T tokens -> [T, HV, V] fp32."""
    h, hv, k_dim, tokens = shape.num_heads, shape.num_v_heads, shape.head_k_dim, len(parents)
    columns = torch.cat([state.conv_state[slot], x])[torch.tensor(_paths(parents), device=x.device)]
    if state.conv_window is not None:
        state.conv_window[row, :tokens] = columns[:, 1:]
    y = conv_silu(columns, params.conv_weight, params.conv_bias)
    q_raw, k_raw, v_raw = y.split([h * k_dim, h * k_dim, hv * shape.head_v_dim], dim=1)
    k_raw, v_raw = k_raw.view(tokens, h, k_dim), v_raw.view(tokens, hv, shape.head_v_dim)
    g = log_decay(a, params, shape)
    beta = 1.0 / (1.0 + torch.exp(-_wide(b)))
    if isinstance(record, Ring):
        n = min(tokens, record.length)
        record.raw_v[ring_slot, :, :n] = v_raw[:n].transpose(0, 1)
        record.raw_k[ring_slot, :, :n] = k_raw[:n].transpose(0, 1)
        record.g[ring_slot, :, :n] = g[:n].transpose(0, 1)
        record.beta[ring_slot, :, :n] = beta[:n].T
    group = hv // h
    q = (l2_normalise(_wide(q_raw.view(tokens, h, k_dim))) * params.scale_for(shape)).repeat_interleave(group, 1)
    k = l2_normalise(_wide(k_raw)).repeat_interleave(group, 1)
    S = _wide(state.ssm_state[slot])
    states = {-1: S}
    if form == "chunked":
        return chunked_outputs(S, q, k, _wide(v_raw), g, beta)
    outputs = []
    for t in range(tokens):
        S = states[t] = delta_step(states[parents[t]], k[t], _wide(v_raw[t]), g[t], beta[t])
        outputs.append((S * q[t][:, None, :]).sum(-1))
        if isinstance(record, Snapshots):
            record.states[row, t] = S
    return torch.stack(outputs)


def commits(
    slots: torch.Tensor, accept_lens: torch.Tensor, num_slots: int, limit: int, errors: torch.Tensor | None,
    track_slots: torch.Tensor | None, track_steps: torch.Tensor | None, starts: torch.Tensor | None, draft_tokens: int,
    rows: torch.Tensor | None = None, num_rows: int | None = None, parents: torch.Tensor | None = None,
) -> list[tuple[int, int, int, int, int]]:  # fmt: skip
    """The (row, slot, accept, track slot or -1, track step) of every batch position that commits something."""
    found = []
    batch = len(slots)
    row_list = range(batch) if rows is None else rows.tolist()
    track_list = [-1] * batch if track_slots is None else track_slots.tolist()
    step_list = [-1] * batch if track_steps is None else track_steps.tolist()
    for i, (row, slot, accept, track, step) in enumerate(
        zip(row_list, slots.tolist(), accept_lens.tolist(), track_list, step_list, strict=True)
    ):
        tokens = slice(0, limit) if starts is None else _range(starts, i)
        usable = [
            usable_slot(slot, num_slots, errors),
            num_rows is None or _usable_row(row, num_rows, errors),
            _usable_range(tokens, draft_tokens, None, errors),
        ]
        if not all(usable):
            continue
        length = tokens.stop - tokens.start
        earlier = list(range(-1, length - 1)) if parents is None else parents[i, :length].tolist()
        if not _usable_parents(earlier, errors):
            continue
        if not 0 <= accept <= min(limit, length):
            _count(errors, ErrorKind.ACCEPT)
            continue
        if accept == 0:
            continue
        if track < -1 or track >= num_slots:
            _count(errors, ErrorKind.TRACK_SLOT)
        wanted = 0 <= track < num_slots and step >= 0 and _on_path(earlier, accept - 1, step)
        found.append((row, slot, accept, track if wanted else -1, step))
    return found


def _replay_records(
    states: torch.Tensor, ring: Ring, slot: int, ring_slot: int, count: int, track: int = -1, step: int = -1
) -> None:
    """Replay the first ``count`` records into one layer's ``states[slot]``; after ``step`` into ``track`` as well."""
    group = ring.g.shape[1] // ring.raw_k.shape[1]
    S = _wide(states[slot])
    for t in range(count):
        k = l2_normalise(_wide(ring.raw_k[ring_slot, :, t])).repeat_interleave(group, 0)
        v, g, beta = (_wide(x[ring_slot, :, t]) for x in (ring.raw_v, ring.g, ring.beta))
        S = delta_step(S, k, v, g, beta)
        if track >= 0 and t == step:
            states[track] = S
    states[slot] = S


def usable_pending(pending: PendingFold, slot: int, length: int, errors: torch.Tensor | None) -> bool:
    """Whether what ``pending`` says of a slot can be, with a ring of ``length``; counted if not."""
    usable = int(pending.parity[slot]) in (0, 1) and 0 <= int(pending.pending[slot]) <= length
    if not usable:
        _count(errors, ErrorKind.ACCEPT)
    return usable


def replay_pending(
    states: torch.Tensor, ring: Ring, pending: PendingFold, slot: int, track: int = -1, step: int = -1
) -> None:
    """Replay one layer's pending records of a usable slot into ``states``, unless that was done."""
    count, now = int(pending.pending[slot]), pending.epoch[slot]
    folded = pending.folded[slot]
    if count == 0 or bool((folded == now).all()):
        return
    bank = 1 - int(pending.parity[slot])
    _replay_records(states, ring, slot, slot + bank * states.shape[0], count, track if step < count else -1, step)
    folded.copy_(now.expand_as(folded))


@torch.no_grad()
def fold_reference(
    ssm_state: torch.Tensor,
    ring: Ring,
    *,
    shape: KdaShape,
    slots: torch.Tensor,
    accept_lens: torch.Tensor,
    draft_tokens: int,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    config: LaunchConfig | None = None,
    errors: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """`kda_kernels.fold` in plain torch."""
    reason = commit_checks.fold_reason(
        ssm_state, ring, shape=shape, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens,
        track_slots=track_slots, track_steps=track_steps, config=config, errors=errors, starts=starts,
        needs_kernels=False,
    )  # fmt: skip
    refuse(reason)
    limit = min(draft_tokens, ring.length)
    for _, slot, accept, track, step in commits(
        slots, accept_lens, ssm_state.shape[1], limit, errors, track_slots, track_steps, starts, draft_tokens
    ):
        for layer in range(ssm_state.shape[0]):
            _replay_records(ssm_state[layer], ring.layer(layer), slot, slot, accept, track, step)


def scatter_conv_reference(
    conv_state: torch.Tensor,
    conv_window: torch.Tensor,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None = None,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> None:
    """`kda_kernels.scatter_conv` in plain torch."""
    _scatter_reference(
        conv_state, conv_window, ("conv_state", "conv_window"), slots, accept_lens, draft_tokens, rows, track_slots,
        track_steps, errors, pdl, last_steps, starts, parents,
    )  # fmt: skip


def scatter_snapshots_reference(
    ssm_state: torch.Tensor,
    snapshots: Snapshots,
    *,
    slots: torch.Tensor,
    accept_lens: torch.Tensor | None = None,
    draft_tokens: int,
    rows: torch.Tensor | None = None,
    track_slots: torch.Tensor | None = None,
    track_steps: torch.Tensor | None = None,
    errors: torch.Tensor | None = None,
    pdl: bool | None = None,
    last_steps: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
) -> None:
    """`kda_kernels.scatter_snapshots` in plain torch."""
    if not isinstance(snapshots, Snapshots):
        raise TypeError(f"snapshots must be Snapshots, got {type(snapshots).__name__}")
    _scatter_reference(
        ssm_state, snapshots.states, ("ssm_state", "snapshots.states"), slots, accept_lens, draft_tokens, rows,
        track_slots, track_steps, errors, pdl, last_steps, starts, parents,
    )  # fmt: skip


@torch.no_grad()
def _scatter_reference(
    dst: torch.Tensor, src: torch.Tensor, names: tuple[str, str], slots: torch.Tensor,
    accept_lens: torch.Tensor | None, draft_tokens: int, rows: torch.Tensor | None, track_slots: torch.Tensor | None,
    track_steps: torch.Tensor | None, errors: torch.Tensor | None, pdl: bool | None, last_steps: torch.Tensor | None,
    starts: torch.Tensor | None, parents: torch.Tensor | None,
) -> None:  # fmt: skip
    reason = commit_checks.scatter_reason(
        dst, src, names=names, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, rows=rows,
        track_slots=track_slots, track_steps=track_steps, errors=errors, pdl=pdl, last_steps=last_steps,
        starts=starts, parents=parents, needs_kernels=False,
    )  # fmt: skip
    refuse(reason)
    if accept_lens is None:
        accept_lens = cast(torch.Tensor, last_steps) + 1
    for row, slot, accept, track, step in commits(
        slots, accept_lens, dst.shape[1], draft_tokens, errors, track_slots, track_steps, starts, draft_tokens,
        rows, src.shape[1], parents,
    ):  # fmt: skip
        dst[:, slot] = src[:, row, accept - 1]
        if track >= 0:
            dst[:, track] = src[:, row, step]
