"""Run as a program, without the interpreter: what Triton's launcher is given by ordinary launches and by replays.

Triton itself binds, specialises and compiles; only the driver is a stand-in, whose launcher notes its arguments. Prints
one JSON line per op: kernels launched, whether a replay's arguments equal the ordinary launch's, and for contrast
whether those of a call with other tensors do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.driver import DriverBase

from kda_kernels import (
    KdaShape,
    LaunchConfig,
    LayerParams,
    LayerState,
    Ring,
    Snapshots,
    _commit_call,
    _launch,
    _replay,
    checks,
    commit,
    commit_checks,
    gather_checks,
    gather_conv,
    host_checks,
    new_error_counts,
    verify,
)
from kda_kernels.aot import TARGETS
from kda_kernels.buffers import KEPT_INPUTS

SHAPE, B, T = KdaShape(1, 1, 64, 64), 2, 2
launched: list[list[Any]] = []


class _Utils:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    @staticmethod
    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), f"function {name}", 32, 0, 1024


class _Launcher:
    """Notes what it is called with, addresses in place of tensors; Triton's has no constants on their way to C."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.constants = [kind == "constexpr" for kind in src.signature.values()]

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, launch_metadata: Any, *rest: Any
    ) -> None:
        arguments = rest[2:]  # after the hooks
        plain = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
        assert len(plain) == len(self.constants)
        launched.append([x, y, z, stream, function, metadata, plain])


class CompilingDriver(DriverBase):
    """An H200 without a device behind it. Tensors on the CPU are on device -1."""

    utils, launcher_cls = _Utils, _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return TARGETS["sm90"]

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("there is none")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("there is none")


def verify_calls() -> dict[str, Callable[[], Callable[[], object]]]:
    """Name -> what makes a call with tensors of its own on groups that it shares with its like."""
    d, bf16 = SHAPE.conv_dim, torch.bfloat16
    params = LayerParams(torch.randn(d, 4).to(bf16), None, torch.randn(1), torch.randn(64))
    state = LayerState.allocate(SHAPE, slots=3, rows=B, steps=T, dtype=bf16, device="cpu")
    compact = LayerState.allocate(SHAPE, slots=3, rows=B, steps=T, dtype=bf16, device="cpu", compact_window=True)
    ring = Ring.allocate(SHAPE, slots=3, length=T, dtype=bf16, device="cpu")
    snapshots = Snapshots.allocate(SHAPE, rows=B, steps=T, device="cpu")

    def maker(
        op: Callable[..., torch.Tensor],
        record: Ring | Snapshots,
        config: LaunchConfig,
        state: LayerState = state,
        kind: str = "",
    ) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            n = B * T
            batches = {
                "ragged": {"starts": torch.arange(B + 1, dtype=torch.int32)},
                "tree": {"parents": torch.tensor([[-1, 0]] * B, dtype=torch.int32)},
            }
            tensors = {
                "mixed_qkv": torch.randn(n, d).to(bf16), "a": torch.randn(n, 64).to(bf16),
                "b": torch.randn(n, 1).to(bf16), "slots": torch.arange(B, dtype=torch.int32),
                "errors": new_error_counts("cpu"), "out": torch.empty(n, 1, 64, dtype=bf16),
                "workspace": torch.empty(n, d, dtype=bf16),
            } | batches.get(kind, {})  # fmt: skip
            groups = {"shape": SHAPE, "params": params, "state": state, "record": record, "config": config}
            return lambda: op(**tensors, **groups, draft_tokens=T)

        return make

    return (
        {
            f"{op.__name__} {record.__class__.__name__} {name}": maker(op, record, config)
            for op in (verify.verify_fused, verify.verify_unfused)
            for record in (ring, snapshots)
            for name, config in (("portable", LaunchConfig()), ("gluon", LaunchConfig(32, 4, rows_per_thread=2)))
        }
        | {
            f"{op.__name__} compact": maker(op, ring, LaunchConfig(32, 4, rows_per_thread=2), compact)
            for op in (verify.verify_fused, verify.verify_unfused)
        }
        | {
            f"verify_unfused {kind}": maker(verify.verify_unfused, snapshots, LaunchConfig(), kind=kind)
            for kind in ("ragged", "tree")
        }
    )


def commit_calls() -> dict[str, Callable[[], Callable[[], object]]]:
    """The same for fold and the scatters."""
    sizes: dict[str, Any] = {"num_layers": 2, "device": "cpu"}
    bf16 = torch.bfloat16
    state = LayerState.allocate(SHAPE, slots=3, rows=B, steps=T, dtype=bf16, **sizes)
    ring = Ring.allocate(SHAPE, slots=3, length=T, dtype=bf16, **sizes)
    snapshots = Snapshots.allocate(SHAPE, rows=B, steps=T, **sizes)
    ops: dict[str, Callable[..., None]] = {
        "fold portable": partial(commit.fold, state.ssm_state, ring, shape=SHAPE, config=LaunchConfig()),
        "fold gluon": partial(
            commit.fold, state.ssm_state, ring, shape=SHAPE, config=LaunchConfig(32, 4, rows_per_thread=2)
        ),
        "scatter_conv": partial(commit.scatter_conv, state.conv_state, state.conv_window),
        "gather_conv": partial(gather_conv, state.conv_state, torch.zeros(2, KEPT_INPUTS, dtype=torch.int64)),
        "scatter_snapshots": partial(commit.scatter_snapshots, state.ssm_state, snapshots),
    }

    def maker(op: Callable[..., None]) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            slots, accept_lens = torch.arange(B, dtype=torch.int32), torch.ones(B, dtype=torch.int64)
            errors = new_error_counts("cpu")
            return lambda: op(slots=slots, accept_lens=accept_lens, draft_tokens=T, errors=errors)

        return make

    return {name: maker(op) for name, op in ops.items()}


def taken() -> list[list[Any]]:
    """The launches since the last look."""
    launches = launched.copy()
    launched.clear()
    return launches


def main() -> None:
    """Compare and print."""
    triton.runtime.driver.set_active(CompilingDriver())
    patches = [
        mock.patch.object(_replay, "DEVICE_TYPES", ("cpu",)),
        mock.patch.object(_launch, "_device_target", return_value=("cuda", 90)),
        mock.patch.object(checks, "device_reason", return_value=None),
        mock.patch.object(commit_checks, "device_reason", return_value=None),
        mock.patch.object(gather_checks, "device_reason", return_value=None),
        mock.patch.object(torch.cuda, "current_device", return_value=-1),
        mock.patch.object(_replay, "current_device", return_value=-1),
        host_checks(False),
    ]
    for patch in patches:
        patch.__enter__()
    for name, make in (verify_calls() | commit_calls()).items():
        first, second = make(), make()
        first()
        other = taken()
        forbidden = AssertionError("an ordinary launch")
        with (
            mock.patch.object(verify, "launch", side_effect=forbidden),
            mock.patch.object(_commit_call, "launch", side_effect=forbidden),
        ):
            second()
        replayed = taken()
        _replay.forget()
        second()
        ordinary = taken()
        kernels = [function for _, _, _, _, function, _, _ in replayed]
        sys.stdout.write(json.dumps([name, kernels, replayed == ordinary, replayed == other]) + "\n")


if __name__ == "__main__":
    main()
