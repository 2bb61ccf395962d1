"""What a launch is made again with: what Triton's launcher passes on, or that launcher itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.nvidia.driver import CudaLauncher

from kda_kernels._relaunch import STREAM, Relaunch, _passed_on

BEFORE: list[Any] = [6, 1, 1, None, 4711, (4, 1, 1024), None, None, None]
ARGUMENTS: list[Any] = [0, 128, 0, None, 0.5, True, 1 << 40]


class Passed(list[tuple[Any, ...]]):
    """What a function of C was given."""

    def __call__(self, *arguments: Any) -> None:
        self.append(arguments)


def triton_launcher(**changes: Any) -> Any:
    """Triton's own, as it is after compiling a kernel that needs no scratch memory, on a function that only looks."""
    launcher = object.__new__(CudaLauncher)
    attributes = {
        "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1, "profile_scratch_size": 0,
        "profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": True, "arg_annotations": [],
        "kernel_signature": b"", "launch": Passed(),
    }  # fmt: skip
    vars(launcher).update(attributes | changes)
    return launcher


def made(launcher: Any) -> Relaunch:
    return Relaunch(*_passed_on(launcher, BEFORE, ARGUMENTS), ARGUMENTS, [(0, 1), (2, 0)])


def test_triton_s_function_is_given_what_its_launcher_gives_it() -> None:
    launcher = triton_launcher()
    again = made(launcher)
    assert again.function is launcher.launch
    assert not launcher.launch, "looking is no launch"
    again.make(7, [32, 16])
    again.make(8, [64, 48])
    for stream, filled in ((7, [16, 128, 32]), (8, [48, 128, 64])):
        launcher(*BEFORE[:STREAM], stream, *BEFORE[STREAM + 1 :], *filled, *ARGUMENTS[3:])

    def plain(passed: tuple[Any, ...]) -> list[Any]:
        return [list(one) if isinstance(one, tuple) else one for one in passed]

    replayed, ordinary = launcher.launch[:2], launcher.launch[2:]
    assert [*map(plain, replayed)] == [*map(plain, ordinary)]
    assert ARGUMENTS[0] == ARGUMENTS[2] == 0
    assert BEFORE[STREAM] is None


class Other:
    """A launcher of another kind, whose ``launch`` gets ``passed``."""

    def __init__(self, *passed: Any) -> None:
        self.launch, self.passed, self.calls = Passed(), passed, Passed()

    def __call__(self, x: int, y: int, z: int, stream: Any, *rest: Any) -> None:
        if not isinstance(stream, int):
            self.launch(*(stream if one == "stream" else one for one in self.passed))
        else:
            self.calls(x, y, z, stream, *rest)


OTHERS = {
    "no object of Python": lambda: Passed(),
    "another number of arguments": lambda: Other(6, 1, 1, "stream", *ARGUMENTS[:-1]),
    "other arguments": lambda: Other(6, 1, 1, "stream", *ARGUMENTS[:-1], 3),
    "the stream elsewhere": lambda: Other("stream", 6, 1, 1, *ARGUMENTS),
    "no stream": lambda: Other(*ARGUMENTS),
    "nothing": lambda: Other(),
    "scratch memory": lambda: Other(6, 1, 1, "stream", torch.zeros(1), *ARGUMENTS),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_launcher_that_is_not_understood_is_called_itself(name: str) -> None:
    launcher = OTHERS[name]()
    again = made(launcher)
    assert again.function is launcher
    again.make(7, [32, 16])
    calls = launcher if isinstance(launcher, Passed) else launcher.calls
    assert calls == [(*BEFORE[:STREAM], 7, *BEFORE[STREAM + 1 :], 16, 128, 32, *ARGUMENTS[3:])]


@pytest.mark.parametrize("kind", ["global", "profile"])
def test_a_kernel_with_scratch_memory_keeps_triton_s_launcher(kind: str) -> None:
    launcher = triton_launcher(**{f"{kind}_scratch_size": 64})
    assert made(launcher).function is launcher
