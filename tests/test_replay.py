"""Calls that equal an earlier one are replayed: same launches, no checks. All others are checked like a first call.

Kernels only record here; that replays compute the same bits is tests/test_replay_gpu.py's, on a GPU.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from kda_kernels import ErrorKind, KdaShape, LaunchConfig, _launch, _replay, verify_fused, verify_unfused
from tests.support.marks import interpreter_only
from tests.support.replays import SHAPE, Layer, Recorded, recorded_launches, taken

pytestmark = interpreter_only

OPS = [verify_fused, verify_unfused]


@pytest.fixture
def log() -> Iterator[list[Recorded]]:
    with recorded_launches() as launches:
        yield launches


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", ["ring", "snapshots"])
@pytest.mark.parametrize("optional", ["none", "all", "errors", "workspace"])
def test_an_equal_call_makes_the_launches_that_it_would_have_made(
    log: list[Recorded], op: Callable[..., torch.Tensor], mode: str, optional: str
) -> None:
    layer = Layer(mode, bias=optional != "none")

    def call() -> dict[str, Any]:
        full = layer.full()
        left_out = {"none": {"rows", "errors", "out", "workspace"}, "all": set()}.get(
            optional, {"rows", "errors", "out", "workspace"} - {optional}
        )
        return {name: value for name, value in full.items() if name not in left_out}

    first, second = call(), call()
    op(**first)
    assert [one.replayed for one in taken(log)] == [False] * (1 if op is verify_fused else 2)
    out = op(**second)
    replayed = taken(log)
    assert all(one.replayed for one in replayed)
    assert out.shape == (6, 2, 64)
    if optional == "all":
        assert out is second["out"]
    assert replayed[-1].arguments["out"] == out.data_ptr()
    assert replayed[0].arguments["x"] == second["mixed_qkv"].data_ptr()

    _replay.forget()
    op(**second | {"out": out})
    ordinary = taken(log)
    assert not any(one.replayed for one in ordinary)
    if op is verify_unfused:
        assert replayed[0].arguments["y"] == replayed[1].arguments["x"]
        if "workspace" not in second:  # each call has its own
            for launches in (ordinary, replayed):
                launches[0].arguments["y"] = launches[1].arguments["x"] = None
    assert [one.what for one in replayed] == [one.what for one in ordinary]


def ragged(**changes: Any) -> dict[str, Any]:
    """Two requests of one and three tokens, rows of nobody after them."""
    return {"starts": torch.tensor([0, 1, 4], dtype=torch.int32), **changes}


def tree(**changes: Any) -> dict[str, Any]:
    """A root with two children, and a chain."""
    return {"parents": torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32), **changes}


KINDS = [("ring", (ragged,)), ("snapshots", (ragged,)), ("snapshots", (tree,)), ("snapshots", (ragged, tree))]


@pytest.mark.parametrize(
    ("mode", "kinds"), KINDS, ids=["-".join([mode, *(k.__name__ for k in kinds)]) for mode, kinds in KINDS]
)
def test_ragged_batches_and_trees_are_replayed_too(
    log: list[Recorded], mode: str, kinds: tuple[Callable[..., dict[str, Any]], ...]
) -> None:
    layer = Layer(mode)

    def call() -> dict[str, Any]:
        given = layer.full()
        for kind in kinds:
            given |= kind()
        return given

    first, second = call(), call()
    verify_unfused(**first)
    assert [one.replayed for one in taken(log)] == [False, False]
    verify_unfused(**second)
    replayed = taken(log)
    assert [one.replayed for one in replayed] == [True, True]
    _replay.forget()
    verify_unfused(**second)
    assert [one.what for one in replayed] == [one.what for one in taken(log)]
    for kind in kinds:
        (name,) = kind()
        assert {one.arguments[name] for one in replayed} == {second[name].data_ptr()}


def test_chains_ragged_batches_and_trees_are_no_equals(log: list[Recorded]) -> None:
    layer = Layer("snapshots")
    given = layer.full()
    kinds = {"chains": {}, "ragged": ragged(), "tree": tree(), "both": ragged() | tree()}
    kinds["64-bit"] = {"starts": kinds["ragged"]["starts"].long()}
    for kind in kinds.values():
        verify_unfused(**given | kind)
        assert [one.replayed for one in taken(log)] == [False, False]
    more_rows = layer.call(batch=3) | ragged() | {"slots": given["slots"]}
    verify_unfused(**more_rows)
    grids = [(one.replayed, one.grid) for one in taken(log)]
    assert [replayed for replayed, _ in grids] == [False, False]


def test_a_group_s_tensor_moved_in_place_is_found_at_its_new_address(log: list[Recorded]) -> None:
    layer = Layer()
    verify_fused(**layer.call())
    old = layer.params.A_log.data_ptr()
    layer.params.A_log.data = torch.ones(2)
    for _ in range(2):
        verify_fused(**layer.call())
    moved = taken(log)[1:]
    assert [one.replayed for one in moved] == [False, True]
    assert {one.arguments["A_log"] for one in moved} == {layer.params.A_log.data_ptr()} != {old}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["mixed_qkv", "a", "b", "out", "workspace"])
def test_a_misaligned_tensor_gets_the_variant_for_it(
    log: list[Recorded], op: Callable[..., torch.Tensor], name: str
) -> None:
    layer = Layer()
    aligned = layer.full()
    like = aligned[name]
    misaligned = aligned | {name: torch.empty(like.numel() + 1, dtype=like.dtype)[1:].view(like.shape)}
    assert misaligned[name].data_ptr() % 16 == 2

    def variants(call: dict[str, Any]) -> list[Any]:
        op(**call)
        return [one.variant for one in taken(log)]

    for_aligned, for_misaligned = variants(aligned), variants(misaligned)
    assert (for_aligned != for_misaligned) == (name != "workspace" or op is verify_unfused)
    for _ in range(2):
        assert variants(misaligned) == for_misaligned
        assert variants(aligned) == for_aligned


def test_a_misaligned_allocation_is_no_equal_of_an_aligned_one(
    log: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def misaligned(like: torch.Tensor, *size: int) -> torch.Tensor:
        return torch.empty(6 * 2 * 64 + 1, dtype=like.dtype)[1:].view(*size)

    monkeypatch.setattr(_replay, "allocation", lambda like: lambda: like.new_empty(*like.shape))
    layer = Layer()
    replayed = []
    for odd in (True, True, False, False, True):
        with monkeypatch.context() as patch:
            if odd:
                patch.setattr(torch.Tensor, "new_empty", misaligned)
            out = verify_fused(**layer.call())
        (one,) = taken(log)
        assert one.arguments["out"] == out.data_ptr()
        assert (out.data_ptr() % 16 != 0) == odd
        replayed.append(one.replayed)
    assert replayed == [False, False, False, True, False]


def test_a_row_stride_is_compared(log: list[Recorded]) -> None:
    layer = Layer()
    wide = torch.randn(6, SHAPE.conv_dim + 24).bfloat16()
    for mixed_qkv, stride in ((wide[:, : SHAPE.conv_dim], 280), (wide[:, : SHAPE.conv_dim].contiguous(), 256)) * 2:
        verify_fused(**layer.call(mixed_qkv=mixed_qkv))
        assert taken(log)[-1].arguments["x_stride"] == stride


def test_views_of_one_projection_are_accepted_again(log: list[Recorded]) -> None:
    """Their spans overlap, their elements do not."""
    layer = Layer()
    for _ in range(2):
        merged = torch.randn(6, SHAPE.conv_dim + 128 + 8).bfloat16()
        mixed_qkv, a, b, _ = merged.split([SHAPE.conv_dim, 128, 2, 6], 1)
        verify_fused(**layer.call(mixed_qkv=mixed_qkv, a=a, b=b))
    assert [one.replayed for one in taken(log)] == [False, True]


def test_which_tensor_is_misaligned_makes_a_difference(log: list[Recorded]) -> None:
    layer = Layer()
    variants = []
    for _ in range(2):
        for odd in ("a", "b"):
            call = layer.call()
            like = call[odd]
            call[odd] = torch.empty(like.numel() + 1, dtype=like.dtype)[1:].view(like.shape)
            verify_fused(**call)
            variants.append(taken(log)[-1].variant)
    assert variants[:2] == variants[2:]
    assert variants[0] != variants[1]


@pytest.mark.parametrize("op", OPS)
def test_an_optional_tensor_is_not_taken_for_another_one_like_it(
    log: list[Recorded], op: Callable[..., torch.Tensor]
) -> None:
    layer = Layer()
    for _ in range(2):
        for name, other in (("rows", "errors"), ("errors", "rows")):
            call = layer.call(len(ErrorKind), **{name: torch.arange(len(ErrorKind), dtype=torch.int32)})
            op(**call)
            given: dict[str, Any] = {}
            for one in taken(log):
                given |= one.arguments
            assert (given[name], given[other]) == (call[name].data_ptr(), None)


@pytest.mark.parametrize("op", OPS)
def test_one_tensor_may_be_both_slots_and_rows(log: list[Recorded], op: Callable[..., torch.Tensor]) -> None:
    layer = Layer()
    for turn in range(3):
        for same in (False, True):
            call = layer.call()
            call["rows"] = call["slots"] if same else call["slots"].clone()
            op(**call)
            launches = taken(log)
            assert all(one.replayed == (turn > 0) for one in launches) or not same
            for name in ("slots", "rows"):
                assert launches[0].arguments[name] == call[name].data_ptr()


def test_tensors_at_other_addresses_are_replayed_there(log: list[Recorded]) -> None:
    """And so are the earlier ones, again."""
    layer = Layer()
    calls = [layer.full() for _ in range(3)]
    verify_fused(**calls[0])
    taken(log)
    for call in (*calls, *calls):
        verify_fused(**call)
        (one,) = taken(log)
        assert one.replayed
        for name, parameter in (("mixed_qkv", "x"), ("a", "a"), ("b", "b"), ("out", "out"), ("errors", "errors")):
            assert one.arguments[parameter] == call[name].data_ptr()


@pytest.mark.parametrize("op", OPS)
def test_outputs_are_like_those_of_a_first_call(log: list[Recorded], op: Callable[..., torch.Tensor]) -> None:
    layer = Layer()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            first, *later = [op(**layer.call()) for _ in range(3)]
        for out in later:
            assert (out.shape, out.stride(), out.dtype, out.device) == (
                first.shape, first.stride(), first.dtype, first.device,
            )  # fmt: skip
            assert (out.is_inference(), out.requires_grad) == (first.is_inference(), False)
        assert len({out.data_ptr() for out in (first, *later)}) == 3
        assert taken(log)[-1].replayed


def test_two_pools_and_two_batch_sizes_take_turns(log: list[Recorded]) -> None:
    layers = [Layer(), Layer(), Layer("snapshots")]
    for turn in range(3):
        for layer in layers:
            for batch in (1, 4):
                verify_fused(**layer.call(batch))
                (one,) = taken(log)
                assert one.replayed == (turn > 0)
                assert one.arguments["ssm_state"] == layer.state.ssm_state.data_ptr()
                assert one.grid == (batch * 2 * 2,)


def test_equal_configurations_and_shapes_are_equal_calls(log: list[Recorded]) -> None:
    layer = Layer()
    for _ in range(2):
        verify_fused(**layer.call(config=LaunchConfig(block_v=32, num_warps=2), shape=KdaShape(1, 2, 64, 64)))
    verify_fused(**layer.call(config=LaunchConfig(block_v=16, num_warps=2)))
    assert [(one.replayed, one.grid) for one in taken(log)] == [(False, (8,)), (True, (8,)), (False, (16,))]


def test_what_is_remembered_is_bounded_and_holds_no_tensor(
    log: list[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_replay, "LIMIT", 8)
    layers = [Layer() for _ in range(5)]
    storages = [weakref.ref(layer.state) for layer in layers] + [weakref.ref(layer.record.g) for layer in layers]
    for layer in layers:
        for batch in range(1, 6):
            verify_fused(**layer.call(batch))
            verify_unfused(**layer.call(batch))
            assert len(_replay._known) <= 8
    del layer, layers
    gc.collect()
    assert [alive() for alive in storages] == [None] * 10


def test_a_new_group_at_an_old_one_s_address_is_another_group(log: list[Recorded]) -> None:
    """The address of the object, which Python soon gives to the next one; all tensors stay where they are."""
    layer = Layer()
    identities = set()
    for bound in (-1.0, -2.0, -3.0, -4.0):
        params = replace(layer.params, lower_bound=bound)
        identities.add(id(params))
        verify_fused(**layer.call(params=params))
        assert taken(log)[-1].arguments["lower_bound"] == bound
        del params
    assert len(identities) < 4, "no address was used again: this test shows nothing"

    turned = layer.state.ssm_state.transpose(2, 3)
    for group, name, bad in (("state", "ssm_state", turned), ("record", "g", layer.record.g.transpose(2, 3))):
        identities = set()
        for _ in range(4):
            good = replace(getattr(layer, group))
            identities.add(id(good))
            verify_fused(**layer.call(**{group: good}))
            del good
            other = replace(getattr(layer, group), **{name: bad})
            identities.add(id(other))
            with pytest.raises(ValueError, match=name):
                verify_fused(**layer.call(**{group: other}))
            del other
        assert len(identities) < 8, "no address was used again: this test shows nothing"


def test_whoever_watches_launches_sees_every_one(log: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    call = layer.call()
    verify_fused(**call)
    seen: list[Any] = []

    def launcher(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        seen.append(kernel)

    with monkeypatch.context() as patch:
        patch.setattr(_launch, "LAUNCHER", launcher)
        verify_fused(**call)
        verify_fused(**call)
    assert len(seen) == 2
    with monkeypatch.context() as patch:
        patch.setattr(_launch, "TARGET_OVERRIDE", ("cuda", 90))
        patch.setattr(_launch, "LAUNCHER", launcher)
        verify_fused(**call)
    assert len(seen) == 3
    taken(log)

    runtime = triton.knobs.runtime
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(seen.append)
        try:
            verify_fused(**call)
        finally:
            hooks.remove(seen.append)
    for knob in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(runtime, knob, seen.append)
            verify_fused(**call)
    assert [one.replayed for one in taken(log)] == [False] * 4
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "launch_enter_hook", None)
        patch.setattr(runtime, "launch_exit_hook", None)
        verify_fused(**call)
    verify_fused(**call)
    assert [one.replayed for one in taken(log)] == [True, True]

    from kda_kernels import verify

    verify.verify_kernel.pre_run_hooks.append(seen.append)
    verify_fused(**call)
    assert not taken(log)[0].replayed


def test_nothing_is_remembered_on_the_cpu(log: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "DEVICE_TYPES", ("cuda",))
    layer = Layer()
    for _ in range(2):
        verify_fused(**layer.call())
    assert not any(one.replayed for one in taken(log))
    assert not _replay._known


def test_an_empty_batch_launches_nothing_twice(log: list[Recorded]) -> None:
    layer = Layer()
    for op in OPS * 2:
        assert op(**layer.call(0)).shape == (0, 2, 64)
    assert not log


def test_threads_may_call_at_once(log: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replay, "LIMIT", 3)
    layers = [Layer() for _ in range(4)]
    failures: list[BaseException] = []

    def work(layer: Layer) -> None:
        try:
            for turn in range(100):
                verify_unfused(**layer.call(1 + turn // 10 % 3))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(log) == 4 * 100 * 2
    owners = {layer.state.ssm_state.data_ptr() for layer in layers}
    assert {one.arguments["ssm_state"] for one in log if one.kernel == "verify_kernel"} == owners
    assert any(one.replayed for one in log)
