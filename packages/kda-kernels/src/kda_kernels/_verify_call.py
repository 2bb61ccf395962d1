"""The arguments of a verify as one value, and how calls that equal an earlier one are recognised and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch

from kda_kernels._launch import Launched
from kda_kernels._replay import ALIGNMENT, Ticket, data_ptr, recall, remember
from kda_kernels.buffers import LayerParams, LayerState, PendingFold, Ring, Snapshots
from kda_kernels.overlap import MemoryMap
from kda_kernels.shapes import KdaShape, LaunchConfig

_VARYING = ("mixed_qkv", "a", "b", "slots", "rows", "errors", "out", "workspace", "starts", "parents")
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
        names = [name for name in _VARYING if getattr(self, name) is not None]
        allocated = {} if self.out is not None else {"out": out}
        if workspace is not None and self.workspace is None:
            allocated["workspace"] = workspace
        if any(data_ptr(tensor) % ALIGNMENT for tensor in allocated.values()):
            return
        _, _, varying, tensors = ticket
        memory = MemoryMap(
            tensors[varying : -3 if self.params.conv_bias is None else -4],  # without the parameters
            kept=self.state.kept_inputs,
            inputs=tensors[:3],
            written={place: tensors[place] for place, name in enumerate(names) if name in ("out", "workspace")},
        )
        remember(ticket, names, launched, allocated, memory.allows)


def replay(call: tuple[Any, ...]) -> tuple[torch.Tensor | None, Ticket | None]:
    """Launch what is known of a call that equals this one, whose fields are `VerifyCall`'s, and return the output.

    Otherwise None, and what to remember the call by if it is accepted.
    """
    (
        mixed_qkv, a, b, shape, params, state, record, slots, draft_tokens, rows, config, errors, out, workspace,
        form, indices_ready, fused, pending, starts, parents,
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
    if starts is not None:
        tensors.append(starts)
    if parents is not None:
        tensors.append(parents)
    varying = len(tensors)
    try:
        window = state.conv_window
        tensors += state.conv_state, state.ssm_state, state.kept_inputs if window is None else window
        if isinstance(record, Ring):
            tensors += record.raw_v, record.raw_k, record.g, record.beta
        else:
            tensors.append(record.states)
        if pending is not None:
            tensors += pending.parity, pending.pending, pending.epoch, pending.folded
        tensors += params.conv_weight, params.A_log, params.dt_bias
        if params.conv_bias is not None:
            tensors.append(params.conv_bias)
        key = (fused, ref(state), ref(record), slots.shape, draft_tokens, form, out is None)
        facts = (
            ref(params), shape, config, indices_ready, rows is None, errors is None, workspace is None,
            draft_tokens.__class__, indices_ready.__class__,  # True equals 1
            None if pending is None else ref(pending), starts is None, parents is None,
        )  # fmt: skip
        known, addresses = recall(key, facts, tensors)
    except Exception:  # launches are watched, or an argument is not what it should be: the checks name it
        return None, None
    if known is None:
        return None, (key, facts, varying, tensors)
    allocated = known.launch(addresses)
    if allocated is None:
        return None, (key, facts, varying, tensors)
    return allocated[0] if out is None else out, None
