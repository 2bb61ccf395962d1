"""The operators of torch.library: what they declare is so, and a compiled graph holds them."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_kernels import (
    KdaShape,
    LaunchConfig,
    LayerParams,
    LayerState,
    PendingFold,
    Ring,
    Snapshots,
    advance,
    flush,
    fold,
    library,
    new_error_counts,
    scatter_conv,
    scatter_snapshots,
    verify_fused,
    verify_unfused,
)

SHAPE = KdaShape(1, 2, 64, 64)
B, T, SLOTS = 1, 2, 3
VERIFY, FOLD = torch.ops.kda.verify.default, torch.ops.kda.fold.default
CONV, SNAPSHOTS = torch.ops.kda.scatter_conv.default, torch.ops.kda.scatter_snapshots.default
VERIFY_PENDING, ADVANCE = torch.ops.kda.verify_pending.default, torch.ops.kda.advance.default
FLUSH, GATHER = torch.ops.kda.flush.default, torch.ops.kda.gather_conv.default


class Layer:
    """One layer's tensors, always the same values."""

    def __init__(self, device: str) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(3)

        def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        fp32 = torch.float32
        self.params = LayerParams(
            normal(SHAPE.conv_dim, 4), normal(SHAPE.conv_dim), normal(2, dtype=fp32), normal(128, dtype=fp32), -5.0
        )
        sizes: dict[str, Any] = dict(device=device, dtype=torch.bfloat16)
        self.state = LayerState.allocate(SHAPE, slots=SLOTS, rows=B, steps=T, **sizes)
        self.state.conv_state.copy_(normal(SLOTS, 3, SHAPE.conv_dim))
        self.state.ssm_state.copy_(normal(SLOTS, 2, 64, 64, dtype=fp32))
        self.ring = Ring.allocate(SHAPE, slots=SLOTS, length=T, **sizes)
        self.snapshots = Snapshots.allocate(SHAPE, rows=B, steps=T, device=device)
        self.errors = new_error_counts(device)
        self.inputs = normal(B * T, SHAPE.conv_dim), normal(B * T, 128), normal(B * T, 2)
        self.slots = torch.tensor([2], dtype=torch.int32, device=device)
        self.accept_lens = torch.tensor([1], dtype=torch.int32, device=device)

    def ring_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.ring.raw_v, self.ring.raw_k, self.ring.g, self.ring.beta

    def verify(self, mode: str, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``kda::verify``."""
        p, s = self.params, self.state
        record = (*self.ring_tensors(), None) if mode == "ring" else (None,) * 4 + (self.snapshots.states,)
        given = (*self.inputs, p.conv_weight, p.conv_bias, p.A_log, p.dt_bias, s.conv_state, s.ssm_state)
        return (*given, s.conv_window, *record, self.slots, None, self.errors, T), dict(lower_bound=-5.0, **options)

    def commits(self) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Operators and arguments of the commits of this one layer."""
        s, common = self.state, (self.slots, self.accept_lens, T)
        return {
            "fold": (FOLD, (s.ssm_state[None], *(t[None] for t in self.ring_tensors()), *common)),
            "scatter_conv": (CONV, (s.conv_state[None], s.conv_window[None], *common)),
            "scatter_snapshots": (SNAPSHOTS, (s.ssm_state[None], self.snapshots.states[None], *common)),
        }

    def written(self) -> list[torch.Tensor]:
        s = self.state
        return [s.conv_state, s.ssm_state, s.windows, *self.ring_tensors(), self.snapshots.states, self.errors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


def by_functions(device: str, mode: str, op: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, Layer]:
    """A round through the functions that the operators call."""
    layer = Layer(device)
    s, common = layer.state, dict(slots=layer.slots, accept_lens=layer.accept_lens, draft_tokens=T)
    record = layer.ring if mode == "ring" else layer.snapshots
    out = op(
        *layer.inputs, shape=SHAPE, params=layer.params, state=s, record=record, slots=layer.slots, draft_tokens=T,
        errors=layer.errors,
    )  # fmt: skip
    scatter_conv(s.conv_state[None], s.conv_window[None], **common)
    if mode == "ring":
        fold(s.ssm_state[None], Ring(*(t[None] for t in layer.ring_tensors())), shape=SHAPE, **common)
    else:
        scatter_snapshots(s.ssm_state[None], Snapshots(layer.snapshots.states[None]), **common)
    return out, layer


def round_of(layer: Layer, mode: str, fused: bool, config: list[int] | None = None) -> torch.Tensor:
    arguments, options = layer.verify(mode, fused=fused, config=config)
    out = torch.ops.kda.verify(*arguments, **options)
    commits = layer.commits()
    for name in ("scatter_conv", "fold" if mode == "ring" else "scatter_snapshots"):
        op, given = commits[name]
        op(*given)
    return out


@pytest.mark.parametrize(("mode", "fused"), [("ring", True), ("snapshots", False)])
def test_operators_have_the_bits_of_the_functions(mode: str, fused: bool, device: str) -> None:
    expected, other = by_functions(device, mode, verify_fused if fused else verify_unfused)
    layer = Layer(device)
    assert torch.equal(round_of(layer, mode, fused, library.launch_numbers(LaunchConfig(block_v=32))), expected)
    same(layer.written(), other.written())
    assert not torch.equal(layer.state.ssm_state, Layer(device).state.ssm_state)


@pytest.mark.parametrize(("mode", "fused"), [("ring", True), ("snapshots", False)])
def test_verify_does_what_it_declares(mode: str, fused: bool, device: str) -> None:
    arguments, options = Layer(device).verify(mode, fused=fused)
    torch.library.opcheck(VERIFY, arguments, options)


@pytest.mark.parametrize("name", ["fold", "scatter_conv", "scatter_snapshots"])
def test_commits_do_what_they_declare(name: str, device: str) -> None:
    op, arguments = Layer(device).commits()[name]
    torch.library.opcheck(op, arguments)
    pair = (torch.tensor([-1], dtype=torch.int32, device=device),) * 2
    torch.library.opcheck(
        op, arguments, dict(track_slots=pair[0], track_steps=pair[1], errors=new_error_counts(device))
    )


class Compact(Layer):
    """A layer that keeps its inputs in place of windows."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.kept_inputs = torch.zeros(1, 3, dtype=torch.int64, device=device)

    def compact(self, mode: str, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``kda::verify``."""
        arguments, options = self.verify(mode, **options, kept_inputs=self.kept_inputs[0])
        return tuple(None if given is self.state.conv_window else given for given in arguments), options

    def gathering(self, *mixed_qkv: torch.Tensor) -> tuple[Any, ...]:
        inputs = list(mixed_qkv) or [self.inputs[0]]
        return self.state.conv_state[None], self.kept_inputs, inputs, self.slots, self.accept_lens, T


@pytest.mark.parametrize(("mode", "fused"), [("ring", True), ("snapshots", False)])
def test_compact_windows_have_the_bits_of_windows(mode: str, fused: bool, device: str) -> None:
    other, layer = Layer(device), Compact(device)
    expected = round_of(other, mode, fused)
    arguments, options = layer.compact(mode, fused=fused)
    assert torch.equal(torch.ops.kda.verify(*arguments, **options), expected)
    torch.ops.kda.gather_conv(*layer.gathering())
    assert torch.equal(layer.state.conv_state, other.state.conv_state)
    assert not layer.state.windows.any()


def test_compact_windows_do_what_they_declare(device: str) -> None:
    layer = Compact(device)
    for fused in (True, False):
        arguments, options = layer.compact("ring", fused=fused)
        # The address of a copy that the check makes of its inputs is another one.
        torch.library.opcheck(VERIFY, arguments, options, test_utils=("test_schema", "test_faketensor"))
    VERIFY(*arguments, **options)
    torch.library.opcheck(GATHER, layer.gathering())
    track = torch.tensor([1], dtype=torch.int32, device=device)
    errors = new_error_counts(device)
    torch.library.opcheck(GATHER, layer.gathering(), dict(track_slots=track, track_steps=track, errors=errors))


def test_a_compact_round_compiles_without_a_graph_break(device: str) -> None:
    other, layer = Layer(device), Compact(device)
    expected = round_of(other, "ring", True)
    torch._dynamo.reset()

    def round_(x: torch.Tensor) -> torch.Tensor:
        mixed_qkv = x * 2  # a tensor of the graph's own, whose memory must not be reused before the commit
        arguments, options = layer.compact("ring")
        out = torch.ops.kda.verify(mixed_qkv, *arguments[1:], **options)
        torch.ops.kda.gather_conv(*layer.gathering(mixed_qkv))
        return out * 2

    compiled = torch.compile(round_, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(layer.inputs[0] / 2), expected * 2)
    assert torch.equal(layer.state.conv_state, other.state.conv_state)


def test_refusals_of_compact_windows(device: str) -> None:
    layer = Compact(device)
    arguments, options = layer.compact("ring")
    with pytest.raises(ValueError, match=r"exactly one of state\.conv_window and state\.kept_inputs"):
        VERIFY(*arguments, **options | dict(kept_inputs=None))
    VERIFY(*arguments, **options)
    with pytest.raises(ValueError, match="mixed_qkv must hold a tensor for each of the 1 layers"):
        GATHER(*layer.gathering(layer.inputs[0], layer.inputs[0]))
    if device == "cpu":
        with pytest.raises(ValueError, match=r"mixed_qkv\[0\] must be bfloat16, got float32"):
            GATHER(*layer.gathering(layer.inputs[0].float()))


def test_on_the_cpu_the_gather_reads_the_inputs_where_they_lie() -> None:
    """Strided, say, or moved since verify."""
    states = []
    for change in (torch.clone, lambda x: x, lambda x: torch.cat([x, x], 1)[:, : x.shape[1]]):
        layer = Compact("cpu")
        arguments, options = layer.compact("ring")
        VERIFY(*arguments, **options)
        GATHER(*layer.gathering(change(layer.inputs[0])))
        states.append(layer.state.conv_state)
    for state in states[1:]:
        assert torch.equal(state, states[0])


class Folding(Layer):
    """A layer of fold on verify, with something pending in its slot."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.ring = Ring.allocate(SHAPE, slots=2 * SLOTS, length=T, dtype=torch.bfloat16, device=device)
        self.fold = PendingFold.allocate(SHAPE, slots=SLOTS, device=device)
        self.by_functions()
        self.functions_advance()

    def pending_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.fold.parity, self.fold.pending, self.fold.epoch, self.fold.folded

    def written(self) -> list[torch.Tensor]:
        return [*super().written(), *self.pending_tensors()]

    def by_functions(self) -> torch.Tensor:
        return verify_fused(
            *self.inputs, shape=SHAPE, params=self.params, state=self.state, record=self.ring, slots=self.slots,
            draft_tokens=T, errors=self.errors, pending=self.fold,
        )  # fmt: skip

    def functions_advance(self) -> None:
        advance(self.fold, slots=self.slots, accept_lens=self.accept_lens, draft_tokens=T, ring_length=T)

    def folding(self, **options: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of ``kda::verify_pending``."""
        arguments, others = self.verify("ring", **options)
        return arguments, others | dict(
            zip(("parity", "pending", "epoch", "folded"), self.pending_tensors(), strict=True)
        )

    def advancing(self) -> tuple[Any, ...]:
        return (*self.pending_tensors(), self.slots, self.accept_lens, T, T)

    def flushing(self) -> tuple[Any, ...]:
        ring, (*bookkeeping, folded) = self.ring_tensors(), self.pending_tensors()
        return (self.state.ssm_state[None], *(t[None] for t in ring), *bookkeeping, folded[None], self.slots)


def test_fold_on_verify_has_the_bits_of_the_functions(device: str) -> None:
    other, layer = Folding(device), Folding(device)
    expected = other.by_functions()
    arguments, options = layer.folding()
    assert torch.equal(torch.ops.kda.verify_pending(*arguments, **options), expected)
    same(layer.written(), other.written())
    assert not torch.equal(layer.state.ssm_state, Layer(device).state.ssm_state), "the pending record was folded"
    other.functions_advance()
    torch.ops.kda.advance(*layer.advancing())
    same(layer.written(), other.written())
    before = layer.state.ssm_state.clone()
    flush(
        other.state.ssm_state[None], Ring(*(t[None] for t in other.ring_tensors())),
        PendingFold(other.fold.parity, other.fold.pending, other.fold.epoch, other.fold.folded[None]),
        shape=SHAPE, slots=other.slots,
    )  # fmt: skip
    torch.ops.kda.flush(*layer.flushing())
    same(layer.written(), other.written())
    assert not torch.equal(layer.state.ssm_state, before)


def test_fold_on_verify_does_what_it_declares(device: str) -> None:
    layer = Folding(device)
    arguments, options = layer.folding()
    for fused in (True, False):
        torch.library.opcheck(VERIFY_PENDING, arguments, options | dict(fused=fused))
    pair = (torch.tensor([-1], dtype=torch.int32, device=device),) * 2
    tracking = dict(track_slots=pair[0], track_steps=pair[1], errors=new_error_counts(device))
    for op, given in ((ADVANCE, layer.advancing()), (FLUSH, layer.flushing())):
        torch.library.opcheck(op, given)
        torch.library.opcheck(op, given, tracking)
    writes = {
        op: {argument.name for argument in op._schema.arguments if argument.is_write} for op in (VERIFY, VERIFY_PENDING)
    }
    assert writes[VERIFY_PENDING] - writes[VERIFY] == {"ssm_state", "folded"}


def test_a_round_of_fold_on_verify_compiles_without_a_graph_break(device: str) -> None:
    other, layer = Folding(device), Folding(device)
    expected = other.by_functions()
    other.functions_advance()
    torch._dynamo.reset()

    def round_() -> torch.Tensor:
        arguments, options = layer.folding()
        out = torch.ops.kda.verify_pending(*arguments, **options)
        torch.ops.kda.advance(*layer.advancing())
        return out * 2

    compiled = torch.compile(round_, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(), expected * 2)
    same(layer.written(), other.written())


def test_refusals_of_fold_on_verify(device: str) -> None:
    layer = Folding(device)
    arguments, options = layer.folding()
    with pytest.raises(ValueError, match="give all of parity, pending, epoch and folded, got 3 of them"):
        VERIFY_PENDING(*arguments, **options | dict(epoch=None))
    snapshots, _ = layer.verify("snapshots")
    with pytest.raises(ValueError, match="pending must be None with Snapshots"):
        VERIFY_PENDING(*snapshots, **options)
    with pytest.raises(RuntimeError, match="parity"):
        VERIFY(*arguments, **options)
    with pytest.raises(ValueError, match="ssm_state must have 5 dimensions"):
        FLUSH(layer.state.ssm_state, *layer.flushing()[1:])
    with pytest.raises(ValueError, match="ring_length must be at least 1, got 0"):
        ADVANCE(*layer.advancing()[:-1], 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("mode", "fused"), [("ring", True), ("snapshots", False)])
def test_a_whole_round_compiles_without_a_graph_break(backend: str, mode: str, fused: bool, device: str) -> None:
    expected, other = by_functions(device, mode, verify_fused if fused else verify_unfused)
    layer = Layer(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: round_of(layer, mode, fused) * 2, fullgraph=True, backend=backend)
    assert torch.equal(compiled(), expected * 2)
    same(layer.written(), other.written())


def test_trees_and_ragged_batches_pass_through(device: str) -> None:
    """Two requests' worth of one: a tree of a root and its child, then its path by last step; and a short chain."""
    layer = Layer(device)
    arguments, options = layer.verify("snapshots", fused=False)
    tree = torch.tensor([[-1, 0]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    chain = torch.ops.kda.verify(*arguments, **options)
    assert torch.equal(torch.ops.kda.verify(*arguments, **options, parents=tree), chain)
    torch.library.opcheck(VERIFY, arguments, options | dict(parents=tree), test_utils="test_schema")
    short = torch.ops.kda.verify(*arguments, **options, starts=starts)
    assert torch.equal(short[0], chain[0])
    assert not short[1].any(), "a row of no request"
    commits, last = layer.commits(), torch.tensor([0], dtype=torch.int32, device=device)
    for name in ("scatter_conv", "scatter_snapshots"):
        op, given = commits[name]
        op(*given[:3], None, T, last_steps=last, parents=tree)
        bad = torch.tensor([2], dtype=torch.int32)
        with pytest.raises(ValueError, match="parents must be None with accept_lens"):
            op(*given[:3], bad.to(device), T, parents=tree)
    assert torch.equal(layer.state.ssm_state[2], layer.snapshots.states[0, 0])
    with pytest.raises(ValueError, match="accept_lens"):
        op(*given[:3], bad, T, starts=starts.cpu())


def test_groups_live_as_long_as_their_tensors() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    before = len(library._groups)
    group = library._grouped(LayerState, tensors)
    assert library._grouped(LayerState, tensors) is group
    assert group.conv_state is not tensors[0], "or it would never die"
    assert library._grouped(LayerState, [torch.ones(2), *tensors[1:]]) is not group
    tensors[1].data = torch.ones(2)  # the same object in another place
    moved = library._grouped(LayerState, tensors)
    assert moved is not group
    assert moved.ssm_state.data_ptr() == tensors[1].data_ptr()
    assert len(library._groups) == before + 1, "the one with a tensor that died is gone"
    tensors[1].data = tensors[1].data.view(torch.int32)  # and as another type where it was
    moved = library._grouped(LayerState, tensors)
    assert moved.ssm_state.dtype == torch.int32
    alive = weakref.ref(moved)
    del moved, group, tensors
    assert alive() is None
    assert len(library._groups) == before


def test_launch_configurations_travel_as_numbers() -> None:
    for config in (
        LaunchConfig(), LaunchConfig(32, 2, False), LaunchConfig(64, 4, True, 2, 128, True, True, True),
    ):  # fmt: skip
        numbers = library.launch_numbers(config)
        assert all(type(number) is int for number in numbers)
        assert library._config(numbers) == config
    assert library.launch_numbers(None) is None
    with pytest.raises(ValueError, match="8 numbers"):
        library._config([16])
    numbers = library.launch_numbers(LaunchConfig(64, 4, rows_per_thread=2))
    assert numbers is not None
    for place, wrong, name in (
        (2, 5, "pdl"), (3, -9, "rows_per_thread"), (4, -2, "max_registers"), (5, -1, "state_first"),
        (7, 2, "token_blocks"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=name):
            library._config([*numbers[:place], wrong, *numbers[place + 1 :]])


def test_refusals_are_those_of_the_functions(device: str) -> None:
    layer = Layer(device)
    arguments, options = layer.verify("ring")
    with pytest.raises(ValueError, match=r"either raw_v, raw_k, g and beta .* got 3 ring tensors and no snapshots"):
        VERIFY(*arguments[:10], None, *arguments[11:], **options)
    with pytest.raises(ValueError, match="form must be one of"):
        VERIFY(*arguments, **options, form="x")
    op, given = layer.commits()["fold"]
    with pytest.raises(ValueError, match="draft_tokens"):
        op(*given[:-1], 0)
    for place, name, count in ((0, "ssm_state", 5), (1, "raw_v", 5), (2, "raw_k", 5)):
        with pytest.raises(ValueError, match=f"{name} must have {count} dimensions"):
            op(*given[:place], given[place][0, 0], *given[place + 1 :])
    for place, wrong, message in (
        (0, arguments[0][0], "mixed_qkv must have 2 dimensions"),
        (8, layer.state.ssm_state[0], "ssm_state must have 4 dimensions"),
        (8, layer.state.ssm_state[..., :0], "ssm_state must have 4 dimensions, the last not empty"),
    ):
        with pytest.raises(ValueError, match=message):
            VERIFY(*arguments[:place], wrong, *arguments[place + 1 :], **options)


def test_registration_is_by_import_of_the_module_only() -> None:
    code = (
        "import kda_kernels, torch; assert not hasattr(torch.ops.kda, 'verify'); "
        "import kda_kernels.library; assert torch.ops.kda.verify; assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
