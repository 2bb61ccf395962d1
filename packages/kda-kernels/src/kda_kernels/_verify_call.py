"""The arguments of a verify as one value, and how calls that equal an earlier one are recognised and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch

from kda_kernels._launch import Launched
from kda_kernels._replay import ALIGNMENT, Ticket, data_ptr, recall, remember, replaying
from kda_kernels.buffers import LayerParams, LayerState, PendingFold, Ring, Snapshots
from kda_kernels.memory import MemoryMap
from kda_kernels.shapes import KdaShape, LaunchConfig

_PER_CALL = ("mixed_qkv", "a", "b", "slots", "rows", "errors", "out", "workspace")
"""The tensors that change from call to call, in the order of a call's addresses. The groups hold all others."""


class VerifyCall(NamedTuple):
    """The arguments of `verify_fused` or `verify_unfused`, and which of the two."""

    mixed_qkv: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    shape: KdaShape
    params: LayerParams
    state: LayerState
    record: Ring | Snapshots
    slots: torch.Tensor
    draft_tokens: int
    rows: torch.Tensor | None
    config: LaunchConfig | None
    errors: torch.Tensor | None
    out: torch.Tensor | None
    workspace: torch.Tensor | None
    form: str
    indices_ready: bool
    fused: bool
    pending: PendingFold | None = None
    starts: torch.Tensor | None = None
    parents: torch.Tensor | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments by name, without the lane."""
        arguments = self._asdict()
        del arguments["fused"]
        return arguments

    def remember(
        self,
        ticket: Ticket,
        out: torch.Tensor,
        workspace: torch.Tensor | None,
        launched: Sequence[tuple[Launched | None, Mapping[str, str]]],
    ) -> None:
        """Remember this call, which was accepted and ``launched``, with the output and workspace that it used."""
        given = {name: tensor for name in _PER_CALL if (tensor := getattr(self, name)) is not None}
        allocated = {} if self.out is not None else {"out": out}
        if workspace is not None and "workspace" not in given:
            allocated["workspace"] = workspace
        if any(data_ptr(tensor) % ALIGNMENT for tensor in allocated.values()):
            return
        key, facts, held = ticket
        memory = MemoryMap(
            # All but the parameters.
            held[: -3 if self.params.conv_bias is None else -4],
            inputs=[self.mixed_qkv, self.a, self.b],
            written={place: given[name] for place, name in enumerate(given) if name in ("out", "workspace")},
        )
        shapes = tuple(tuple(tensor.shape) for tensor in allocated.values())
        remember(key, facts, held, given, allocated, launched, (memory, shapes))


def replay(call: tuple[Any, ...]) -> tuple[torch.Tensor | None, Ticket | None]:
    """Launch what is known of a call that equals this one, whose fields are `VerifyCall`'s, and return the output.

    Otherwise None, and what to remember the call by if it is accepted.
    """
    if not replaying():
        return None, None
    (
        mixed_qkv, a, b, shape, params, state, record, slots, draft_tokens, rows, config, errors, out, workspace,
        form, indices_ready, fused, pending,
    ) = call  # fmt: skip
    tensors = [mixed_qkv, a, b, slots]
    if rows is not None:
        tensors.append(rows)
    if errors is not None:
        tensors.append(errors)
    if out is not None:
        tensors.append(out)
    if workspace is not None:
        tensors.append(workspace)
    try:
        key = (fused, ref(state), ref(record), slots.shape, draft_tokens, form, out is None)
        facts = (
            ref(params), shape, config, indices_ready, rows is None, errors is None, workspace is None,
            draft_tokens.__class__, indices_ready.__class__,  # True equals 1
            None if pending is None else ref(pending),
        )  # fmt: skip
        held = held_tensors(params, state, record, pending)
        known, addresses = recall(key, facts, held, tensors)
    except Exception:  # an argument is not what it should be: the checks name it
        return None, None
    ticket = key, facts, held
    if known is None:
        return None, ticket
    memory, shapes = known.extra
    if not memory.allows(addresses):
        return None, ticket
    allocated = [mixed_qkv.new_empty(*shape) for shape in shapes]
    for tensor in allocated:
        address = data_ptr(tensor)
        if address % ALIGNMENT:
            return None, ticket
        addresses.append(address)
    known.launch(addresses)
    return allocated[0] if out is None else out, ticket


def held_tensors(
    params: LayerParams, state: LayerState, record: Ring | Snapshots, pending: PendingFold | None = None
) -> tuple[torch.Tensor, ...]:
    """The tensors of a verify's groups: those of state, record and pending folds, then the parameters."""
    if isinstance(record, Ring):
        buffers: tuple[torch.Tensor, ...] = (record.raw_v, record.raw_k, record.g, record.beta)
    else:
        buffers = (record.states,)
    if pending is not None:
        buffers = (*buffers, pending.parity, pending.pending, pending.epoch, pending.folded)
    bias = () if params.conv_bias is None else (params.conv_bias,)
    return (
        state.conv_state, state.ssm_state, state.conv_window, *buffers,
        params.conv_weight, params.A_log, params.dt_bias, *bias,
    )  # fmt: skip
