"""Private functions of torch that replays use: what they tell and allocate, and what happens without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kda_kernels import _torch_fast
from kda_kernels._torch_fast import _empty_strided, allocation, likeness, working_guards

PRIVATE: Any = torch._C._dynamo.guards


@pytest.fixture(params=["torch's guards", "no guards"], autouse=True)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no guards":
        monkeypatch.setattr(_torch_fast, "GUARDS", None)
    return request.param != "no guards"


def tensor() -> torch.Tensor:
    return torch.zeros(4, 6, dtype=torch.bfloat16)


UNLIKE: dict[str, Callable[[], torch.Tensor]] = {
    "fewer rows": lambda: tensor()[:3],
    "fewer columns": lambda: tensor()[:, :5],
    "another shape": lambda: tensor().view(6, 4),
    "more dimensions": lambda: tensor()[None],
    "other strides": lambda: tensor().view(6, 4).t(),
    "a gap between rows": lambda: torch.zeros(4, 7, dtype=torch.bfloat16)[:, :6],
    "another dtype of that size": lambda: tensor().half(),
    "another dtype": lambda: tensor().float(),
    "another device": lambda: tensor().to("meta"),
}


def test_this_torch_has_working_guards() -> None:
    assert working_guards() is PRIVATE.TensorGuards


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("place", range(3))
def test_any_tensor_that_varies_and_differs_is_unlike(name: str, place: int) -> None:
    alike = likeness([tensor() for _ in range(3)], [])
    others = [tensor() for _ in range(3)]
    assert alike(*others)
    others[place] = UNLIKE[name]()
    assert not alike(*others)


@pytest.mark.parametrize("name", UNLIKE)
def test_a_held_tensor_is_unlike_in_more_with_guards_than_without(name: str, guards: bool) -> None:
    alike = likeness([tensor()], [tensor(), tensor()])
    assert alike(tensor(), tensor(), tensor())
    other = UNLIKE[name]()
    assert alike(tensor(), tensor(), other) == (not guards and other.numel() == 24)


def test_one_tensor_may_be_in_two_places() -> None:
    one, other = tensor(), tensor()
    assert likeness([one, one], [])(other, other)
    assert not likeness([one, one], [])(other, other.t())


def test_nothing_is_held() -> None:
    tensors = [tensor(), tensor()]
    alive = [weakref.ref(one) for one in tensors]
    kept = likeness(tensors[:1], tensors[1:]), allocation(tensors[0])
    del tensors
    gc.collect()
    assert [one() for one in alive] == [None, None]
    assert all(map(callable, kept))


@pytest.fixture
def untried() -> Iterator[None]:
    """No allocation function has been tried yet, and none that a test puts in its place is kept."""
    _empty_strided.cache_clear()
    yield
    _empty_strided.cache_clear()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("private", [True, False])
def test_an_allocation_is_like_its_model(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not private:
        monkeypatch.delattr(PRIVATE, "_empty_strided_cpu")
    like = torch.zeros(2, 3, 5, dtype=torch.float16)
    allocate = allocation(like)
    assert (allocate.func is torch.empty) is not private
    one, other = allocate(), allocate()
    assert (one.shape, one.stride(), one.dtype, one.device) == (like.shape, like.stride(), like.dtype, like.device)
    assert one.data_ptr() != other.data_ptr()
    with torch.inference_mode():
        assert allocate().is_inference()


@pytest.mark.usefixtures("untried")
def test_an_allocation_that_is_unlike_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PRIVATE, "_empty_strided_cpu", lambda shape, strides, dtype: torch.zeros(3))
    assert allocation(tensor())().shape == (4, 6)


@pytest.mark.usefixtures("untried")
def test_torchs_function_is_tried_once_not_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    own = PRIVATE._empty_strided_cpu
    monkeypatch.setattr(PRIVATE, "_empty_strided_cpu", lambda *given: (made.append(given), own(*given))[1])
    for _ in range(3):
        allocation(tensor())
    assert len(made) == 1, "a call that is met under graph capture allocates its outputs only"


class Lenient:
    """Guards that tell nothing apart."""

    def __init__(self, *tensors: torch.Tensor, **options: Any) -> None:
        pass

    def check(self, *tensors: torch.Tensor) -> bool:
        return True


def test_guards_that_do_not_work_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken in (Lenient, list, None):
        monkeypatch.setattr(PRIVATE, "TensorGuards", broken)
        assert working_guards() is None
    monkeypatch.delattr(PRIVATE, "TensorGuards")
    assert working_guards() is None
