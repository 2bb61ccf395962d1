"""State of many requests on many KDA layers, and the verify/commit round over it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kda_backend.commit import commit_layers
from kda_kernels import (
    KdaShape,
    LaunchConfig,
    LayerParams,
    LayerState,
    Ring,
    Snapshots,
    describe_errors,
    new_error_counts,
    verify_fused,
    verify_reference,
    verify_unfused,
)

MODES = ("ring", "snapshots")
LANES = ("unfused", "unfused+ring", "fused", "fused+ring")
REFERENCE_LANE = "reference"

_VERIFY: dict[str, Callable[..., torch.Tensor]] = {
    "unfused": verify_unfused,
    "unfused+ring": verify_unfused,
    "fused": verify_fused,
    "fused+ring": verify_fused,
    REFERENCE_LANE: verify_reference,
}
_UNFUSED = ("unfused", "unfused+ring")


def lane_mode(lane: str) -> str:
    """The state mode that a lane of `LANES` needs: "ring" or "snapshots"."""
    if lane not in LANES:
        raise ValueError(f"lane must be one of {LANES}, got {lane!r}")
    return "ring" if lane.endswith("+ring") else "snapshots"


class StatePool:
    """Slots of recurrent and conv state for ``num_layers`` KDA layers of one shape, with scratch to undo drafts.

    A round is `begin`, then `verify` once per layer, then `commit`. ``draft_tokens=1`` with accept length 1 is plain
    decoding. Which slots belong to which request is the caller's business; slot 0 is an ordinary slot.

    Args:
        shape: head layout of every layer.
        num_layers: KDA layers.
        num_slots: slots per layer.
        max_batch: most requests in one round (rows of conv windows and snapshots).
        draft_tokens: most tokens per request and round, the root included.
        mode: "ring" or "snapshots".
        dtype: activation dtype, torch.bfloat16 or torch.float16.
        device: where the tensors live.
        ring_length: L, records per slot; None means ``draft_tokens``. At least ``draft_tokens``.

    Raises:
        ValueError: a size is below 1, the mode is unknown, or the ring is shorter than the drafts.
    """

    def __init__(
        self,
        shape: KdaShape,
        *,
        num_layers: int,
        num_slots: int,
        max_batch: int,
        draft_tokens: int,
        mode: str,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        ring_length: int | None = None,
    ) -> None:
        sizes = {
            "num_layers": num_layers, "num_slots": num_slots, "max_batch": max_batch, "draft_tokens": draft_tokens,
        }  # fmt: skip
        if not isinstance(shape, KdaShape):
            raise TypeError(f"shape must be a KdaShape, got {type(shape).__name__}")
        for name, value in sizes.items():
            _check_int(name, value, 1)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {dtype}")
        if ring_length is not None and mode != "ring":
            raise ValueError(f"ring_length goes with mode='ring', got ring_length={ring_length} with mode={mode!r}")
        if ring_length is not None:
            _check_int("ring_length", ring_length, 1)
        length = draft_tokens if ring_length is None else ring_length
        if length < draft_tokens:
            raise ValueError(
                f"ring_length must be at least draft_tokens={draft_tokens}, got {length}: "
                "records past the ring are dropped and their tokens could not be committed"
            )
        self.shape, self.mode, self.dtype = shape, mode, dtype
        self.num_layers, self.num_slots = num_layers, num_slots
        self.max_batch, self.draft_tokens = max_batch, draft_tokens
        self.state = LayerState.allocate(
            shape, slots=num_slots, rows=max_batch, steps=draft_tokens, dtype=dtype, device=device,
            num_layers=num_layers,
        )  # fmt: skip
        self.device = self.state.ssm_state.device
        self.record: Ring | Snapshots
        if mode == "ring":
            self.record = Ring.allocate(
                shape, slots=num_slots, length=length, dtype=dtype, device=device, num_layers=num_layers
            )
        else:
            self.record = Snapshots.allocate(
                shape, rows=max_batch, steps=draft_tokens, device=device, num_layers=num_layers
            )
        self.errors = new_error_counts(self.device)
        self._uncounted = new_error_counts(self.device)
        self._workspace = torch.empty(max_batch * draft_tokens, shape.conv_dim, dtype=dtype, device=device)
        self._lanes = [name for name in LANES if lane_mode(name) == mode] + [REFERENCE_LANE]
        self._layers = [(self.state.layer(i), self.record.layer(i)) for i in range(num_layers)]
        self._round: _Round | None = None

    @property
    def conv_state(self) -> torch.Tensor:
        """[layers, slots, 3, D], activation dtype."""
        return self.state.conv_state

    @property
    def ssm_state(self) -> torch.Tensor:
        """[layers, slots, HV, V, K] fp32."""
        return self.state.ssm_state

    @property
    def conv_window(self) -> torch.Tensor:
        """[layers, max_batch, draft_tokens, 3, D], activation dtype."""
        return self.state.conv_window

    @property
    def ring(self) -> Ring | None:
        """The ring of all layers, or None in snapshot mode."""
        return self.record if isinstance(self.record, Ring) else None

    @property
    def snapshots(self) -> Snapshots | None:
        """The snapshots of all layers, or None in ring mode."""
        return self.record if isinstance(self.record, Snapshots) else None

    @property
    def scratch_bytes(self) -> int:
        """Bytes that undoing drafts costs: ring or snapshots."""
        return self.record.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all the pool's tensors."""
        own = (self.errors, self._uncounted, self._workspace)
        return self.state.num_bytes + self.record.num_bytes + sum(t.numel() * t.element_size() for t in own)

    def load_slot(self, slot: int, conv_state: torch.Tensor, ssm_state: torch.Tensor) -> None:
        """Copy a request's state (after prefill, say) into a slot of every layer.

        Args:
            slot: 0..num_slots-1.
            conv_state: [layers, 3, D], activation dtype, oldest column first.
            ssm_state: [layers, HV, V, K] fp32.

        Raises:
            RuntimeError: a round is open, whose commit would fold its drafts onto the new state; see `abandon`.
            ValueError: the slot is not in the pool, or a tensor's shape or dtype differs.
            TypeError: the slot is not an int, or a state is not a tensor.

        The pool is unchanged by a refused call.
        """
        if self._round is not None:
            raise RuntimeError("load_slot needs the round to be over: commit it, or abandon() it")
        _check_int("slot", slot, 0, self.num_slots - 1)
        pairs = (("conv_state", conv_state, self.conv_state), ("ssm_state", ssm_state, self.ssm_state))
        for name, given, own in pairs:
            if not isinstance(given, torch.Tensor):
                raise TypeError(f"{name} must be a Tensor, got {type(given).__name__}")
            wanted = [self.num_layers, *own.shape[2:]]
            if list(given.shape) != wanted:
                raise ValueError(f"{name} must have shape {wanted}, got {list(given.shape)}")
            if given.dtype != own.dtype:
                raise ValueError(f"{name} must be {own.dtype}, got {given.dtype}")
        moved = [given.detach().to(self.device) for _, given, _ in pairs]
        for (_, _, own), given in zip(pairs, moved, strict=True):
            own[:, slot] = given

    def begin(self, slots: torch.Tensor, draft_tokens: int) -> None:
        """Start a round: the slot of each batch position, and the tokens that each request verifies.

        Args:
            slots: [B] int32 or int64 on the pool's device, -1 for padding; B <= max_batch. Kept, not copied (a CUDA
                graph replays on it): do not change it before `commit`.
            draft_tokens: 1..``self.draft_tokens``, the root included.

        Raises:
            TypeError: ``slots`` is not a tensor, or ``draft_tokens`` not an int.
            ValueError: the batch or the drafts are larger than the pool's, or ``slots`` is not an index vector.

        An open round is dropped; nothing of it was committed.
        """
        if not isinstance(slots, torch.Tensor):
            raise TypeError(f"slots must be a Tensor, got {type(slots).__name__}")
        if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"slots must be a 1-D int32 or int64 tensor, got {slots.dtype} of {list(slots.shape)}")
        if slots.shape[0] > self.max_batch:
            raise ValueError(f"slots must have at most max_batch={self.max_batch} entries, got {slots.shape[0]}")
        _check_int("draft_tokens", draft_tokens, 1, self.draft_tokens)
        self._round = _Round(slots, draft_tokens, self._workspace[: slots.shape[0] * draft_tokens])

    def abandon(self) -> None:
        """Drop the open round, if any: state stays as it was before `begin`."""
        self._round = None

    def verify(
        self,
        layer: int,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        params: LayerParams,
        *,
        lane: str,
        config: LaunchConfig | None = None,
        out: torch.Tensor | None = None,
        form: str = "recurrent",
        indices_ready: bool = False,
    ) -> torch.Tensor:
        """Verify the round's tokens on one layer, through ``lane``; state is only read until `commit`.

        Args:
            layer: 0..num_layers-1.
            mixed_qkv: [B*T, D]; a: [B*T, HV*K]; b: [B*T, HV]; as `kda_kernels.verify_fused`.
            params: the layer's parameters.
            lane: one of `LANES` that fits the pool's mode, or "reference" (plain torch).
            config: launch configuration.
            out: [B*T, HV, V] to write into.
            form: "recurrent", or "chunked" (mode "ring", at most 16 draft tokens): outputs within rounding of plain
                decoding's and no longer equal to them; the states that `commit` leaves are equal, given equal inputs.
            indices_ready: the kernel launched just before this one on the stream does not write the round's slots.

        Returns:
            [B*T, HV, V] in the activation dtype.

        Raises:
            RuntimeError: no round was begun.
            ValueError: the lane does not fit the pool's mode, or the kernels refuse an argument.
        """
        current = self._current_round()
        _check_int("layer", layer, 0, self.num_layers - 1)
        if lane not in self._lanes:
            raise ValueError(f"lane must be one of {self._lanes} in a pool of mode {self.mode!r}, got {lane!r}")
        state, record = self._layers[layer]
        result = _VERIFY[lane](
            mixed_qkv, a, b, shape=self.shape, params=params, state=state, record=record, slots=current.slots,
            draft_tokens=current.draft_tokens, config=config,
            # Every layer sees the same slots: one of them counts. The others count aside, for the same compiled kernel.
            errors=self.errors if layer == 0 else self._uncounted,
            out=out, workspace=current.workspace if lane in _UNFUSED else None, form=form,
            indices_ready=indices_ready,
        )  # fmt: skip
        current.verified.add(layer)
        current.reference |= lane == REFERENCE_LANE
        return result

    def commit(
        self,
        accept_lens: torch.Tensor,
        *,
        track_slots: torch.Tensor | None = None,
        track_steps: torch.Tensor | None = None,
    ) -> None:
        """Advance every layer's state by each request's accepted prefix, and end the round.

        Args:
            accept_lens: [B] int32 or int64, 0..draft_tokens (the root included); 0 leaves the slot untouched.
            track_slots, track_steps: [B] a second slot that receives the state after a step; see `kda_kernels.fold`.

        Raises:
            RuntimeError: no round was begun; a layer was not verified in it (its record would be a stale one); or the
                slots given to `begin` were changed since.
            ValueError: the kernels refuse an argument.

        A refused call leaves the pool unchanged and the round open. Once kernels are launched the round is over, also
        if that fails midway: folding twice would be worse than not at all.
        """
        current = self._current_round()
        missing = sorted(set(range(self.num_layers)) - current.verified)
        if missing:
            raise RuntimeError(f"commit needs every layer verified in this round; layers {missing} were not")
        if current.slots._version != current.version:
            raise RuntimeError("slots were changed in place since begin(): the records belong to the old ones")
        commit_layers(
            self.state, self.record, shape=self.shape, slots=current.slots, accept_lens=accept_lens,
            draft_tokens=current.draft_tokens, track_slots=track_slots, track_steps=track_steps,
            errors=self.errors, uncounted=self._uncounted, reference=current.reference, on_launch=self.abandon,
        )  # fmt: skip

    def error_summary(self) -> str | None:
        """What the device has counted so far (see `kda_kernels.ErrorKind`), or None. Waits for the device.

        A faulty row is counted by the round's verify (on layer 0) and again by its commit.
        """
        return describe_errors(self.errors)

    def _current_round(self) -> _Round:
        if self._round is None:
            raise RuntimeError("no round has begun: call begin(slots, draft_tokens) first")
        return self._round


class _Round:
    """Slots and draft tokens of the round under way, the workspace for them, and the layers verified so far."""

    def __init__(self, slots: torch.Tensor, draft_tokens: int, workspace: torch.Tensor) -> None:
        self.slots, self.draft_tokens, self.version = slots, draft_tokens, slots._version
        self.workspace = workspace
        self.verified: set[int] = set()
        self.reference = False


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"within {low}..{high}"
        raise ValueError(f"{name} must be {allowed}, got {value}")
