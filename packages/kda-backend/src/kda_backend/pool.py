"""State of many requests on many KDA layers, and the verify/commit round over it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kda_backend.commit import commit_layers
from kda_backend.gate import Decision, decide, device_name_of, option_name
from kda_backend.lanes import LANES, MODES, REFERENCE_LANE, Target, lane_mode
from kda_backend.rounds import Round, batch_reason
from kda_backend.slots import check_int
from kda_backend.storage import SlotStorage
from kda_kernels import LaunchConfig, LayerParams, verify_fused, verify_reference, verify_unfused
from kda_kernels.checking import refuse

__all__ = ["LANES", "MODES", "REFERENCE_LANE", "StatePool", "lane_mode"]

_VERIFY: dict[str, Callable[..., torch.Tensor]] = {
    "unfused": verify_unfused,
    "unfused+ring": verify_unfused,
    "fused": verify_fused,
    "fused+ring": verify_fused,
    REFERENCE_LANE: verify_reference,
}
_UNFUSED = ("unfused", "unfused+ring")
_ALLOWED = {mode: [*(lane for lane in LANES if lane_mode(lane) == mode), REFERENCE_LANE] for mode in MODES}


class StatePool(SlotStorage):
    """Slots of recurrent and conv state for ``num_layers`` KDA layers of one shape, with scratch to undo drafts.

    A round is `begin`, then `verify` once per layer, then `commit`. ``draft_tokens=1`` with accept length 1 is plain
    decoding. Slot 0 is an ordinary slot.

    Which slots belong to which request is the pool's business with `allocate` and `free`, or the engine's own. An
    engine that numbers slots itself never calls `allocate`, which would hand out a slot that it uses, and every method
    takes any slot of the pool. Once `allocate` was called, slots that are free are refused wherever the host sees which
    they are: numbers, and index tensors on the CPU.

    Rings need no reset: each round writes every record that its commit can replay, whatever the slot held before.

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
        fold_on_verify: with mode "ring": `commit` writes down how many drafts were accepted, and the next round's
            `verify` replays them while it has the state in hands. A round then reads and writes the state once, for a
            second ring (the plan has its bytes). Same bits; only what else reads `ssm_state` must call `flush` before.
        compact_window: `verify` writes no conv windows; `commit` takes the new conv states from the old ones and each
            layer's mixed_qkv, which the pool holds from verify to commit and nobody may write to until then. Same bits,
            for chains and ragged batches. An engine that reuses one buffer for all layers cannot have it.

    Raises:
        TypeError: a size is not an int, ``fold_on_verify`` or ``compact_window`` not a bool, or ``device`` no device.
        ValueError: a size is below 1, the mode is unknown, the ring is shorter than the drafts, ``fold_on_verify``
            goes with no ring, or torch cannot use the device.
    """

    def begin(
        self,
        slots: torch.Tensor,
        draft_tokens: int,
        *,
        starts: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
    ) -> None:
        """Start a round: the slot of each batch position, and the tokens that each request verifies.

        Args:
            slots: [B] int32 or int64 on the pool's device, -1 for padding; B <= max_batch. Kept, not copied (a CUDA
                graph replays on it): do not change it before `commit`.
            draft_tokens: 1..``self.draft_tokens``, the root included; of a ragged batch, the most that a request has.
            starts: [B+1] token offsets of a ragged batch, as `kda_kernels.verify_unfused`; kept like ``slots``.
            parents: [B, T] parents of a batch of trees, as `kda_kernels.verify_unfused`, in mode "snapshots"; kept
                like ``slots``. `commit` then takes ``last_steps``.

        Raises:
            TypeError: ``slots`` is not a tensor, or ``draft_tokens`` not an int.
            ValueError: the batch or the drafts are larger than the pool's; ``slots``, ``starts`` or ``parents`` have a
                wrong shape, dtype or device or, on the CPU, wrong values; or trees were given to a pool of rings or
                with compact windows. A round that is open stays open.
            RuntimeError: a round is being replayed.

        An open round is dropped; nothing of it was committed.
        """
        self._refuse_in_replay("begin")
        if not isinstance(slots, torch.Tensor):
            raise TypeError(f"slots must be a Tensor, got {type(slots).__name__}")
        if slots.ndim == 1 and slots.shape[0] > self.max_batch:
            raise ValueError(f"slots must have at most max_batch={self.max_batch} entries, got {slots.shape[0]}")
        draft_tokens = check_int("draft_tokens", draft_tokens, 1, self.draft_tokens)
        for name, given in (("starts", starts), ("parents", parents)):
            if given is not None and not isinstance(given, torch.Tensor):
                raise TypeError(f"{name} must be a Tensor or None, got {type(given).__name__}")
        if parents is not None and self.mode == "ring":
            raise ValueError(
                "parents must be None in a pool of mode 'ring': a ring replays a chain; use mode 'snapshots'"
            )
        if parents is not None and self.compact_window:
            raise ValueError(
                "parents must be None in a pool with compact_window: a tree's conv windows follow its paths, commit "
                "takes columns of a chain; use compact_window=False"
            )
        refuse(batch_reason(slots, draft_tokens, starts, parents, self.num_slots, self.device))
        self._check_allocated("slots", slots)
        self._round = Round(slots, draft_tokens, starts, parents)

    def abandon(self) -> None:
        """Drop the open round, if any: state stays as it was before `begin`."""
        self._round = None

    @contextmanager
    def replayed_round(self) -> Iterator[None]:
        """Mark the time from the replay of a CUDA graph that verifies to that of the one that commits.

        A replay calls no method of the pool, which then takes no round to be open. Within, it refuses `begin` and what
        it refuses in an open round on a device: a slot allocated, loaded or copied there would get another request's
        drafts. Leave it without the second replay to drop them. A graph of a whole round needs no mark.

        Raises:
            RuntimeError: a round is open or being replayed; its drafts would be overwritten.
        """
        self._refuse_in_replay("replayed_round")
        if self._round is not None:
            raise RuntimeError("replayed_round needs the round to be over: commit it, or abandon() it")
        self._replaying = True
        try:
            yield
        finally:
            self._replaying = False

    def verify(
        self,
        layer: int,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        params: LayerParams,
        *,
        lane: str | None = None,
        config: LaunchConfig | None = None,
        out: torch.Tensor | None = None,
        form: str = "recurrent",
        indices_ready: bool = False,
    ) -> torch.Tensor:
        """Verify the round's tokens on one layer; committed state stays what it is until `commit`.

        Args:
            layer: 0..num_layers-1.
            mixed_qkv: [B*T, D]; a: [B*T, HV*K]; b: [B*T, HV]; as `kda_kernels.verify_fused`. Of a ragged batch,
                [N, ..] with at most max_batch * draft_tokens rows. With compact windows mixed_qkv is held until the
                round is over and must not change; neither it nor ``out`` may share memory with another layer's.
            params: the layer's parameters.
            lane: one of `LANES` that fits the pool's mode, or "reference" (plain torch); None takes `lane_choice`.
            config: launch configuration; None takes that of `lane_choice` if that named the lane, or else the kernels'
                default.
            out: [B*T, HV, V] to write into.
            form: "recurrent", or "chunked" (mode "ring", at most 16 draft tokens): outputs within rounding of plain
                decoding's and no longer equal to them; the states that `commit` leaves are equal, given equal inputs.
            indices_ready: the kernel launched just before this one on the stream does not write the round's slots.

        Returns:
            [B*T, HV, V] in the activation dtype.

        Raises:
            RuntimeError: no round was begun.
            ValueError: the lane does not fit the pool's mode, the kernels refuse an argument, or one lies where a kept
                input does.
        """
        current = self._current_round()
        layer = check_int("layer", layer, 0, self.num_layers - 1)
        if lane is None:
            choice = self.lane_choice(form, safe_gate=getattr(params, "lower_bound", None) is not None)
            lane, config = choice.lane, config or choice.launch
        if lane not in (lanes := _ALLOWED[self.mode]):
            raise ValueError(f"lane must be one of {lanes} in a pool of mode {self.mode!r}, got {lane!r}")
        if self.compact_window:
            refuse(current.kept.reason(layer, "mixed_qkv", mixed_qkv) or current.kept.reason(layer, "out", out))
        state, record, pending = self._layers[layer]
        batch = {} if current.starts is None and current.parents is None else {
            "starts": current.starts, "parents": current.parents,
        }  # fmt: skip
        folding = {} if pending is None else {"pending": pending}
        result = _VERIFY[lane](
            mixed_qkv, a, b, shape=self.shape, params=params, state=state, record=record, slots=current.slots,
            draft_tokens=current.draft_tokens, config=config,
            # Every layer sees the same slots: one of them counts. The others count aside, for the same compiled kernel.
            errors=self.errors if layer == 0 else self._uncounted,
            out=out, workspace=self._workspace_for(mixed_qkv) if lane in _UNFUSED else None, form=form,
            indices_ready=indices_ready, **batch, **folding,
        )  # fmt: skip
        if self.compact_window:
            current.kept.keep(layer, mixed_qkv)
        current.verified.add(layer)
        current.reference |= lane == REFERENCE_LANE
        return result

    def lane_choice(self, form: str = "recurrent", *, safe_gate: bool = True) -> Decision:
        """The lane that `verify` takes in the open round if the caller names none, its launch configuration, and why.

        By the dispatch gate (`kda_backend.gate.decide`, docs/gate.md), asked once per round, form and gate.

        Args:
            form: that of `verify`.
            safe_gate: whether the layer has a lower bound.

        Raises:
            RuntimeError: no round was begun.
            ValueError: the form is unknown, or the environment forces a lane that this round cannot take.
        """
        current = self._current_round()
        try:
            return current.choices[form, safe_gate]
        except (KeyError, TypeError):  # TypeError: a form that cannot be hashed is refused by name
            choice = self._decide(
                batch=current.slots.shape[0], draft_tokens=current.draft_tokens, form=form, safe_gate=safe_gate,
                ragged=current.starts is not None, tree=current.parents is not None,
            )  # fmt: skip
            current.choices[form, safe_gate] = choice
            return choice

    @functools.cached_property
    def _decide(self) -> Callable[..., Decision]:
        """The dispatch gate with everything filled in that is the pool's; the device's name is read once."""
        option = option_name(fold_on_verify=self.pending is not None, compact_window=self.compact_window)
        return functools.partial(
            decide, self.shape, mode=self.mode, dtype=self.dtype, device_name=device_name_of(self.device),
            target=Target.of(self.device), option=option,
        )  # fmt: skip

    def commit(
        self,
        accept_lens: torch.Tensor | None = None,
        *,
        last_steps: torch.Tensor | None = None,
        track_slots: torch.Tensor | None = None,
        track_steps: torch.Tensor | None = None,
    ) -> None:
        """Advance every layer's state by each request's accepted prefix, and end the round.

        Args:
            accept_lens: [B] int32 or int64, 0..draft_tokens (the root included); 0 leaves the slot untouched. Of a
                ragged batch at most the request's own length.
            last_steps: [B] int32 or int64, of trees in place of accept_lens: the step that the accepted path ends at,
                -1 to leave the slot untouched.
            track_slots: [B] a second slot (of a prefix cache, say) that receives the row's state and conv state after
                a step, in the same launches; -1 for none. Not a slot of the round: refused where both are on the CPU,
                the caller's to keep on a device. With fold on verify, such a commit also brings the round's slots up to
                date, in a launch of its own.
            track_steps: [B] that step, 0-based. One outside the accepted prefix (of a tree, the accepted path) is not
                written.

        Raises:
            RuntimeError: no round was begun; a layer was not verified in it (its record would be a stale one); or an
                index tensor given to `begin`, or with compact windows a mixed_qkv given to `verify`, was changed in
                place since. (On a device this is seen of tensors that are no views into larger storages and were not
                made in inference mode; of index tensors on the CPU always.)
            ValueError: the kernels refuse an argument, or a tracking slot, on the CPU, is not allocated where others
                were.

        A refused call leaves the pool unchanged and the round open. Once kernels are launched the round is over, also
        if that fails midway: folding twice would be worse than not at all.
        """
        current = self._current_round()
        missing = sorted(set(range(self.num_layers)) - current.verified)
        if missing:
            raise RuntimeError(f"commit needs every layer verified in this round; layers {missing} were not")
        if (name := current.changed()) is not None:
            raise RuntimeError(f"{name} were changed in place since begin(): the records belong to the old ones")
        if (layer := current.kept.changed()) is not None:
            raise RuntimeError(f"mixed_qkv of layer {layer} was changed in place since verify(): commit still reads it")
        given, missed = ("last_steps", "accept_lens") if current.parents is not None else ("accept_lens", "last_steps")
        ends = {"accept_lens": accept_lens, "last_steps": last_steps}
        if ends[given] is None or ends[missed] is not None:
            got = " and ".join(name for name, ends_at in ends.items() if ends_at is not None) or "neither"
            kind = "trees" if given == "last_steps" else "chains"
            raise ValueError(f"commit of {kind} takes {given} and not {missed}, got {got}: see begin(parents=...)")
        if isinstance(track_slots, torch.Tensor) and track_slots.ndim == 1:
            self._check_allocated("track_slots", track_slots)
        commit_layers(
            self.state, self.record, shape=self.shape, slots=current.slots, accept_lens=accept_lens,
            draft_tokens=current.draft_tokens, last_steps=last_steps, starts=current.starts, parents=current.parents,
            track_slots=track_slots, track_steps=track_steps, errors=self.errors, uncounted=self._uncounted,
            reference=current.reference, on_launch=self.abandon, pending=self.pending,
            mixed_qkv=current.kept.of_layers(self.num_layers) if self.compact_window else None,
        )  # fmt: skip

    def _workspace_for(self, mixed_qkv: torch.Tensor) -> torch.Tensor:
        """The conv output of that many token rows; a ragged batch that has more than the pool's is refused."""
        rows = mixed_qkv.shape[0] if isinstance(mixed_qkv, torch.Tensor) and mixed_qkv.ndim else 0
        if rows > self._workspace.shape[0]:
            raise ValueError(
                f"mixed_qkv must have at most max_batch * draft_tokens = {self._workspace.shape[0]} rows, got {rows}"
            )
        return self._workspace[:rows]

    def _current_round(self) -> Round:
        if self._round is None:
            raise RuntimeError("no round has begun: call begin(slots, draft_tokens) first")
        return self._round
