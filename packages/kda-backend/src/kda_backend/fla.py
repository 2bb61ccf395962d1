"""Bridge to flash-linear-attention: its cache of one KDA layer to the states of pool slots, and back.

flash-linear-attention (fla) caches, per layer, ``recurrent_state`` [N, HV, V, K] fp32 and three conv caches
[N, H*K, 4], [N, H*K, 4], [N, HV*V, 4], of q, k and v. A conv cache has one column per tap, the last is the current
token's; the next token's update shifts the oldest one out before it reads anything. A slot has one packed conv state
[3, D] without that oldest, already spent column:

    conv_state = cat([q, k, v], dim=1)[:, :, 1:].transpose(1, 2)

On the way back the oldest column is not known any more. It is set to zero; no later output depends on it.
Nothing here imports fla: the functions take and give tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kda_kernels import CONV_WIDTH, KdaShape

_NAMES = ("q", "k", "v")


def slot_from_fla(
    recurrent_state: torch.Tensor,
    conv_states: Sequence[torch.Tensor],
    *,
    shape: KdaShape,
    v_first: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of fla's cache as slots: what `StatePool.load_slot` takes, stacked over layers.

    ``pool.load_slot(slot, conv_state=torch.stack([c[n] for c, _ in layers]), ssm_state=torch.stack(...))`` loads
    sequence n.

    Args:
        recurrent_state: [N, HV, V, K] fp32; with ``v_first=False`` [N, HV, K, V], as fla's naive functions and its
            kernels without ``state_v_first`` keep it.
        conv_states: the q, k and v caches, [N, H*K, 4], [N, H*K, 4], [N, HV*V, 4], of one 16-bit dtype.
        shape: head layout of the layer.
        v_first: layout of ``recurrent_state``. With V = K no shape tells the two apart.

    Returns:
        conv_state [N, 3, D] in the caches' dtype, oldest column first, and ssm_state [N, HV, V, K] fp32; both are
        copies, packed.

    Raises:
        TypeError: an argument is of the wrong class.
        ValueError: a tensor's shape or dtype is not that of the layer, or tensors are on several devices.
    """
    _check_shape(shape)
    _check_v_first(v_first)
    sizes = (shape.head_v_dim, shape.head_k_dim) if v_first else (shape.head_k_dim, shape.head_v_dim)
    count = _check_tensor("recurrent_state", recurrent_state, (shape.num_v_heads, *sizes), (torch.float32,))
    if not isinstance(conv_states, tuple | list):
        raise TypeError(f"conv_states must be the three caches of q, k and v, got {type(conv_states).__name__}")
    if len(conv_states) != 3:
        raise ValueError(f"conv_states must be the three caches of q, k and v, got {len(conv_states)}")
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    for i, (cache, channels) in enumerate(zip(conv_states, _channels(shape), strict=True)):
        name = f"conv_states[{i}] ({_NAMES[i]})"
        found = _check_tensor(name, cache, (channels, CONV_WIDTH), dtypes)
        if found != count:
            raise ValueError(f"{name} must have as many sequences as recurrent_state, {count}, got {found}")
        if cache.device != recurrent_state.device:
            raise ValueError(f"{name} must be on {recurrent_state.device} as recurrent_state, got {cache.device}")
        dtypes = (cache.dtype,)
    packed = torch.cat([cache[:, :, 1:] for cache in conv_states], dim=1).transpose(1, 2)
    state = recurrent_state if v_first else recurrent_state.transpose(-1, -2)
    return packed.contiguous(), state.clone(memory_format=torch.contiguous_format)


def fla_from_slot(
    conv_state: torch.Tensor, ssm_state: torch.Tensor, *, shape: KdaShape, v_first: bool = True
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Slots of one layer as fla's cache: the inverse of `slot_from_fla`, but for the oldest conv column, set to 0.

    Commit the round before: a slot with drafts that are verified and not committed is the state before them.

    Args:
        conv_state: [N, 3, D] bf16 or fp16, ``pool.conv_state[layer, slots]``.
        ssm_state: [N, HV, V, K] fp32, ``pool.ssm_state[layer, slots]``; of a pool that folds on verify, after
            ``pool.flush(slots)``.
        shape: head layout of the layer.
        v_first: layout of the recurrent state to make; see `slot_from_fla`.

    Returns:
        recurrent_state, then the q, k and v caches as `slot_from_fla` takes them; copies, packed, so that fla may
        update them in place.

    Raises:
        TypeError: an argument is of the wrong class.
        ValueError: a tensor's shape or dtype is not that of the layer, or they are on two devices.
    """
    _check_shape(shape)
    _check_v_first(v_first)
    wanted = (CONV_WIDTH - 1, shape.conv_dim)
    count = _check_tensor("conv_state", conv_state, wanted, (torch.bfloat16, torch.float16))
    heads = (shape.num_v_heads, shape.head_v_dim, shape.head_k_dim)
    found = _check_tensor("ssm_state", ssm_state, heads, (torch.float32,))
    if found != count:
        raise ValueError(f"ssm_state must have as many slots as conv_state, {count}, got {found}")
    if ssm_state.device != conv_state.device:
        raise ValueError(f"ssm_state must be on {conv_state.device} as conv_state, got {ssm_state.device}")
    packed = conv_state.new_zeros(count, shape.conv_dim, CONV_WIDTH)
    packed[:, :, 1:] = conv_state.transpose(1, 2)
    q, k, v = (part.contiguous() for part in packed.split(_channels(shape), dim=1))
    state = ssm_state if v_first else ssm_state.transpose(-1, -2)
    return state.clone(memory_format=torch.contiguous_format), (q, k, v)


def conv_weight_from_fla(weights: Sequence[torch.Tensor], *, shape: KdaShape) -> torch.Tensor:
    """The packed ``LayerParams.conv_weight`` [D, 4] of the three ``ShortConvolution.weight``, each [channels, 1, 4].

    Raises:
        TypeError: an argument is of the wrong class.
        ValueError: there are not three weights, or one's shape is not that of the layer.
    """
    _check_shape(shape)
    if not isinstance(weights, tuple | list):
        raise TypeError(f"weights must be the three conv weights of q, k and v, got {type(weights).__name__}")
    if len(weights) != 3:
        raise ValueError(f"weights must be the three conv weights of q, k and v, got {len(weights)}")
    for i, (weight, channels) in enumerate(zip(weights, _channels(shape), strict=True)):
        name = f"weights[{i}] ({_NAMES[i]})"
        if not isinstance(weight, torch.Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(weight).__name__}")
        if list(weight.shape) != [channels, 1, CONV_WIDTH]:
            raise ValueError(f"{name} must have shape {[channels, 1, CONV_WIDTH]}, got {list(weight.shape)}")
    return torch.cat([weight.detach().squeeze(1) for weight in weights])


def _channels(shape: KdaShape) -> tuple[int, int, int]:
    """Channels of q, k and v."""
    keys = shape.num_heads * shape.head_k_dim
    return keys, keys, shape.num_v_heads * shape.head_v_dim


def _check_shape(shape: object) -> None:
    if not isinstance(shape, KdaShape):
        raise TypeError(f"shape must be a KdaShape, got {type(shape).__name__}")


def _check_v_first(v_first: object) -> None:
    if not isinstance(v_first, bool):
        raise TypeError(f"v_first must be True or False, got {v_first!r}")


def _check_tensor(name: str, tensor: object, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
    """The first size of a tensor whose other sizes and dtype must be these."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a Tensor, got {type(tensor).__name__}")
    if tensor.ndim != len(sizes) + 1 or list(tensor.shape[1:]) != list(sizes):
        raise ValueError(f"{name} must have shape [N, {', '.join(map(str, sizes))}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    return tensor.shape[0]
