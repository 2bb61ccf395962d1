"""The kernels as `torch.library` operators, for graphs that torch.compile or an engine builds: ``torch.ops.kda.*``.

Importing this module registers them; `kda_kernels` itself does not. An operator takes tensors and numbers only, so what
`kda_kernels.verify_fused` and the commits take in groups stands here one by one; head layout is read from the tensors'
shapes. They call those functions: same checks, same refusals, same bits. Which arguments are written is declared:

- ``kda::verify`` writes conv_window or kept_inputs, the ring or the snapshots, and errors; it returns the output.
  ``kda::verify_pending`` (fold on verify) also writes ssm_state and folded.
- ``kda::fold`` and ``kda::scatter_snapshots`` write ssm_state and errors, ``kda::scatter_conv`` conv_state and errors.
- ``kda::gather_conv`` writes conv_state and errors.
- ``kda::advance`` writes parity, pending, epoch and errors, ``kda::flush`` ssm_state, folded and errors.

None has a derivative. A group is built when its tensors are first seen together and kept as long as they live, so a
repeated call is recognised (see `verify_fused`) if it passes the same tensor objects, not views made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from kda_kernels._launch import pitch
from kda_kernels.buffers import LayerParams, LayerState, PendingFold, Ring, Snapshots
from kda_kernels.checking import refuse
from kda_kernels.commit import fold as _fold
from kda_kernels.commit import scatter_conv as _scatter_conv
from kda_kernels.commit import scatter_snapshots as _scatter_snapshots
from kda_kernels.gather import gather_conv as _gather_conv
from kda_kernels.gather_checks import gather_inputs_reason
from kda_kernels.pending import advance as _advance
from kda_kernels.pending import flush as _flush
from kda_kernels.shapes import KdaShape, LaunchConfig
from kda_kernels.verify import verify_fused, verify_unfused


def launch_numbers(config: LaunchConfig | None) -> list[int] | None:
    """A launch configuration as the ``config`` of an operator: eight whole numbers, -1 for None."""
    if config is None:
        return None
    values = (
        config.block_v, config.num_warps, config.pdl, config.rows_per_thread, config.max_registers,
        config.state_first, config.prefetch, config.token_blocks,
    )  # fmt: skip
    return [-1 if value is None else int(value) for value in values]


def _config(numbers: Sequence[int] | None) -> LaunchConfig | None:
    """The inverse of `launch_numbers`."""
    if numbers is None:
        return None
    if len(numbers) != 8:
        raise ValueError(f"config must have the 8 numbers that launch_numbers() gives, got {len(numbers)}")
    block_v, num_warps, pdl, rows, registers, *flags = numbers
    # What is no flag goes on as it is, for the configuration to refuse.
    own: list[Any] = [{0: False, 1: True}.get(number, number) for number in (pdl, *flags)]
    return LaunchConfig(
        block_v, num_warps, None if pdl == -1 else own[0], None if rows == -1 else rows,
        None if registers == -1 else registers, *own[1:],
    )  # fmt: skip


_groups: dict[tuple[Any, ...], tuple[Any, list[Tensor | None], list[ref[Tensor]]]] = {}
"""Groups by class, ids of tensors and numbers; with aliases of the tensors, which they hold, and weak references."""


def _grouped(build: Callable[..., Any], tensors: Sequence[Tensor | None], *numbers: float | None) -> Any:
    """``build(*tensors, *numbers)``, the same object as long as the tensors are the same and lie where they did.

    A group kept here must not keep the tensors' memory: it holds aliases, and a tensor's death lets go of them.
    """
    key = (build, *map(id, tensors), *numbers)
    if (found := _groups.get(key)) is not None:
        # ``t.data = ...`` and the like leave the tensor the same object, and its alias where it was.
        if all(map(_same_memory, tensors, found[1])):
            return found[0]
        del _groups[key]
    aliases = [None if tensor is None else tensor.detach() for tensor in tensors]

    def forget(_: object) -> None:
        _groups.pop(key, None)

    entry = build(*aliases, *numbers), aliases, [ref(tensor, forget) for tensor in tensors if tensor is not None]
    _groups[key] = entry
    return entry[0]


def _same_memory(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (
        one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
        and one.dtype == other.dtype
    )  # fmt: skip


def _record(ring: Sequence[Tensor | None], snapshots: Tensor | None) -> Ring | Snapshots:
    given = [tensor for tensor in ring if tensor is not None]
    if snapshots is not None and not given:
        return _grouped(Snapshots, (snapshots,))
    if snapshots is None and len(given) == 4:
        return _grouped(Ring, given)
    raise ValueError(
        "give either raw_v, raw_k, g and beta (ring mode) or snapshots (snapshot mode), got "
        f"{len(given)} ring tensors and {'no ' if snapshots is None else ''}snapshots"
    )


def _check_dimensions(count: int, **tensors: Tensor) -> None:
    """Refuse tensors that have too few dimensions, or too many, to read a head layout from."""
    for name, tensor in tensors.items():
        if tensor.ndim != count or not tensor.shape[-1]:
            raise ValueError(f"{name} must have {count} dimensions, the last not empty, got shape {list(tensor.shape)}")


def _verify(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    conv_state: Tensor,
    ssm_state: Tensor,
    conv_window: Tensor | None,
    raw_v: Tensor | None,
    raw_k: Tensor | None,
    g: Tensor | None,
    beta: Tensor | None,
    snapshots: Tensor | None,
    slots: Tensor,
    rows: Tensor | None,
    errors: Tensor | None,
    draft_tokens: int,
    lower_bound: float | None = None,
    scale: float | None = None,
    fused: bool = True,
    form: str = "recurrent",
    indices_ready: bool = False,
    config: Sequence[int] | None = None,
    starts: Tensor | None = None,
    parents: Tensor | None = None,
    kept_inputs: Tensor | None = None,
    parity: Tensor | None = None,
    pending: Tensor | None = None,
    epoch: Tensor | None = None,
    folded: Tensor | None = None,
) -> Tensor:
    """`kda_kernels.verify_fused`, or with ``fused=False`` `verify_unfused`, on one layer.

    Args:
        mixed_qkv, a, b, slots, rows, errors, draft_tokens, form, indices_ready: as there.
        conv_weight, conv_bias, A_log, dt_bias, lower_bound, scale: as `kda_kernels.LayerParams`.
        conv_state, ssm_state, conv_window, kept_inputs: as `kda_kernels.LayerState`. A graph that commits by
            ``kda::gather_conv`` must give that operator the very mixed_qkv that it gave this one.
        raw_v, raw_k, g, beta: as `kda_kernels.Ring`; all four in ring mode, none in snapshot mode.
        snapshots: [rows, steps, HV, V, K] fp32 in snapshot mode, else None.
        config: `launch_numbers` of a launch configuration, or None for the default.
        starts, parents: of a ragged batch or a tree, with ``fused=False``; as `verify_unfused`.
        parity, pending, epoch, folded: of ``kda::verify_pending`` alone: as `kda_kernels.PendingFold`, all four.

    Returns:
        [B*T, HV, V] in mixed_qkv's dtype.

    Raises:
        ValueError: an argument is refused, or ring and snapshots are both given, or neither whole; or what is pending
            is not given whole.
    """
    _check_dimensions(2, mixed_qkv=mixed_qkv)
    _check_dimensions(4, ssm_state=ssm_state)
    heads, head_v_dim, head_k_dim = ssm_state.shape[1:]
    op = verify_fused if fused else verify_unfused
    return op(
        mixed_qkv, a, b,
        shape=KdaShape(
            (mixed_qkv.shape[1] - heads * head_v_dim) // (2 * head_k_dim), heads, head_k_dim, head_v_dim
        ),
        params=_grouped(LayerParams, (conv_weight, conv_bias, A_log, dt_bias), lower_bound, scale),
        state=_grouped(LayerState, (conv_state, ssm_state, conv_window, kept_inputs)),
        record=_record((raw_v, raw_k, g, beta), snapshots),
        slots=slots, draft_tokens=draft_tokens, rows=rows, config=_config(config), errors=errors, form=form,
        indices_ready=indices_ready, starts=starts, parents=parents, pending=_pending((parity, pending, epoch, folded)),
    )  # fmt: skip


def _pending(tensors: Sequence[Tensor | None]) -> PendingFold | None:
    given = [tensor for tensor in tensors if tensor is not None]
    if len(given) not in (0, 4):
        raise ValueError(f"give all of parity, pending, epoch and folded, got {len(given)} of them")
    return _grouped(PendingFold, given) if given else None


# Two operators, because what is declared as written is functionalised: a compiled graph may copy it.
_WRITTEN = ("conv_window", "kept_inputs", "raw_v", "raw_k", "g", "beta", "snapshots", "errors")
_OWN = ", Tensor? parity"
"""Where the arguments of ``kda::verify_pending`` alone begin."""

verify = torch.library.custom_op(
    "kda::verify", _verify, mutates_args=_WRITTEN,
    schema=torch.library.infer_schema(_verify, mutates_args=_WRITTEN).partition(_OWN)[0] + ") -> Tensor",
)  # fmt: skip
verify_pending = torch.library.custom_op(
    "kda::verify_pending", _verify, mutates_args=(*_WRITTEN, "ssm_state", "folded")
)


@verify.register_fake
@verify_pending.register_fake
def _(mixed_qkv: Tensor, a: Tensor, b: Tensor, *arguments: object, **keywords: object) -> Tensor:
    ssm_state = keywords["ssm_state"] if "ssm_state" in keywords else arguments[5]
    if not isinstance(ssm_state, Tensor):
        raise TypeError(f"ssm_state must be a Tensor, got {type(ssm_state).__name__}")
    return mixed_qkv.new_empty(mixed_qkv.shape[0], ssm_state.shape[1], ssm_state.shape[2])


@torch.library.custom_op("kda::fold", mutates_args=("ssm_state", "errors"))
def fold(
    ssm_state: Tensor,
    raw_v: Tensor,
    raw_k: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    accept_lens: Tensor,
    draft_tokens: int,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
    errors: Tensor | None = None,
    config: Sequence[int] | None = None,
    starts: Tensor | None = None,
) -> None:
    """`kda_kernels.fold`, its ring one by one. Every tensor of state and ring has a leading [layers]."""
    _check_dimensions(5, ssm_state=ssm_state, raw_v=raw_v, raw_k=raw_k)
    shape = KdaShape(raw_k.shape[2], raw_v.shape[2], ssm_state.shape[-1], ssm_state.shape[-2])
    _fold(
        ssm_state, _grouped(Ring, (raw_v, raw_k, g, beta)), shape=shape, slots=slots, accept_lens=accept_lens,
        draft_tokens=draft_tokens, track_slots=track_slots, track_steps=track_steps, config=_config(config),
        errors=errors, starts=starts,
    )  # fmt: skip


@torch.library.custom_op("kda::scatter_conv", mutates_args=("conv_state", "errors"))
def scatter_conv(
    conv_state: Tensor,
    conv_window: Tensor,
    slots: Tensor,
    accept_lens: Tensor | None,
    draft_tokens: int,
    rows: Tensor | None = None,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
    errors: Tensor | None = None,
    last_steps: Tensor | None = None,
    starts: Tensor | None = None,
    parents: Tensor | None = None,
) -> None:
    """`kda_kernels.scatter_conv`."""
    _scatter_conv(
        conv_state, conv_window, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, rows=rows,
        track_slots=track_slots, track_steps=track_steps, errors=errors, last_steps=last_steps, starts=starts,
        parents=parents,
    )  # fmt: skip


@torch.library.custom_op("kda::gather_conv", mutates_args=("conv_state", "errors"))
def gather_conv(
    conv_state: Tensor,
    kept_inputs: Tensor,
    mixed_qkv: Sequence[Tensor],
    slots: Tensor,
    accept_lens: Tensor,
    draft_tokens: int,
    starts: Tensor | None = None,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
    errors: Tensor | None = None,
) -> None:
    """`kda_kernels.gather_conv`; ``mixed_qkv`` of each layer, as ``kda::verify`` was given it.

    On the CPU the operator reads those tensors where they lie. On a device it reads by the addresses in
    ``kept_inputs``, since writing others there would cost a launch per layer: they are arguments so that a graph keeps
    them until then, and must be the very tensors.
    """
    if len(mixed_qkv) != kept_inputs.shape[0]:
        raise ValueError(
            f"mixed_qkv must hold a tensor for each of the {kept_inputs.shape[0]} layers of kept_inputs, "
            f"got {len(mixed_qkv)}"
        )
    if kept_inputs.device.type == "cpu":
        refuse(
            gather_inputs_reason(
                conv_state, list(mixed_qkv), slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens,
                starts=starts, track_slots=track_slots, track_steps=track_steps, errors=errors,
            )
        )  # fmt: skip
        kept_inputs = torch.tensor([(x.data_ptr(), pitch(x), x.shape[0]) for x in mixed_qkv], dtype=torch.int64)
    _gather_conv(
        conv_state, kept_inputs, slots=slots, accept_lens=accept_lens, draft_tokens=draft_tokens, starts=starts,
        track_slots=track_slots, track_steps=track_steps, errors=errors,
    )  # fmt: skip


@torch.library.custom_op("kda::scatter_snapshots", mutates_args=("ssm_state", "errors"))
def scatter_snapshots(
    ssm_state: Tensor,
    snapshots: Tensor,
    slots: Tensor,
    accept_lens: Tensor | None,
    draft_tokens: int,
    rows: Tensor | None = None,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
    errors: Tensor | None = None,
    last_steps: Tensor | None = None,
    starts: Tensor | None = None,
    parents: Tensor | None = None,
) -> None:
    """`kda_kernels.scatter_snapshots`, the snapshots as the tensor [layers, rows, steps, HV, V, K]."""
    _scatter_snapshots(
        ssm_state, _grouped(Snapshots, (snapshots,)), slots=slots, accept_lens=accept_lens,
        draft_tokens=draft_tokens, rows=rows, track_slots=track_slots, track_steps=track_steps, errors=errors,
        last_steps=last_steps, starts=starts, parents=parents,
    )  # fmt: skip


@torch.library.custom_op("kda::advance", mutates_args=("parity", "pending", "epoch", "errors"))
def advance(
    parity: Tensor,
    pending: Tensor,
    epoch: Tensor,
    folded: Tensor,
    slots: Tensor,
    accept_lens: Tensor,
    draft_tokens: int,
    ring_length: int,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
    errors: Tensor | None = None,
    starts: Tensor | None = None,
) -> None:
    """`kda_kernels.advance`, what is pending one by one; ``folded`` of one layer or of all."""
    _advance(
        _grouped(PendingFold, (parity, pending, epoch, folded)), slots=slots, accept_lens=accept_lens,
        draft_tokens=draft_tokens, ring_length=ring_length, track_slots=track_slots, track_steps=track_steps,
        errors=errors, starts=starts,
    )  # fmt: skip


@torch.library.custom_op("kda::flush", mutates_args=("ssm_state", "folded", "errors"))
def flush(
    ssm_state: Tensor,
    raw_v: Tensor,
    raw_k: Tensor,
    g: Tensor,
    beta: Tensor,
    parity: Tensor,
    pending: Tensor,
    epoch: Tensor,
    folded: Tensor,
    slots: Tensor,
    track_slots: Tensor | None = None,
    track_steps: Tensor | None = None,
    errors: Tensor | None = None,
) -> None:
    """`kda_kernels.flush`, its ring and what is pending one by one. State, ring and folded have a leading [layers]."""
    _check_dimensions(5, ssm_state=ssm_state, raw_v=raw_v, raw_k=raw_k)
    shape = KdaShape(raw_k.shape[2], raw_v.shape[2], ssm_state.shape[-1], ssm_state.shape[-2])
    _flush(
        ssm_state, _grouped(Ring, (raw_v, raw_k, g, beta)), _grouped(PendingFold, (parity, pending, epoch, folded)),
        shape=shape, slots=slots, track_slots=track_slots, track_steps=track_steps, errors=errors,
    )  # fmt: skip


@fold.register_fake
@gather_conv.register_fake
@advance.register_fake
@flush.register_fake
@scatter_conv.register_fake
@scatter_snapshots.register_fake
def _(*arguments: object, **keywords: object) -> None:
    return None
