"""Row invariance of everything outside the KDA kernels, and decoding runs on a small random model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kda_backend import LANES, StatePool
from kda_tooling.demo import decoding
from kda_tooling.demo.decoding import ACTIVATION_DTYPE, Decoder, RequestState, RowBlocks, ingest
from kda_tooling.demo.model import KdaLanguageModel, ModelConfig

TINY = ModelConfig(num_layers=2, width=48, num_heads=1, mlp_width=40)
PROMPTS = (b"for i in range(8):\n    for i in range(", b"import os\nimport sys\nimport ", b"x")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def make_model(config: ModelConfig) -> KdaLanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = KdaLanguageModel(config).eval().requires_grad_(False)
    # A flat head would leave the choice of byte to chance ties; spread the logits.
    model.embedding.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def tiny() -> KdaLanguageModel:
    return make_model(TINY)


@pytest.fixture(scope="module")
def requests_after_prompt(tiny: KdaLanguageModel) -> list[RequestState]:
    model = make_model(TINY)
    return [ingest(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("rows", [1, 3, 12, 16, 33, pytest.param(64, marks=pytest.mark.gpu)], ids=lambda n: f"rows{n}")
def test_a_rows_result_depends_on_no_other_row(rows: int, device: str) -> None:
    model = make_model(ModelConfig()).to(device)
    blocks = RowBlocks.for_device(device)
    mixer, mlp = next(model.layers())
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, model.config.width, generator=generator).to(device)
    functions = {
        "project": lambda y: mixer.project(y),
        "mlp": lambda y: (mlp(y),),
        "logits": lambda y: (model.logits(y),),
    }
    for name, function in functions.items():
        together = blocks(function, x)
        shuffled = blocks(function, x.flip(0))
        for i in range(rows):
            alone = blocks(function, x[i : i + 1])
            for whole, turned, single in zip(together, shuffled, alone, strict=True):
                assert same_bits(whole[i], single[0]), (name, i, "alone")
                assert same_bits(whole[i], turned[rows - 1 - i]), (name, i, "another position")


def test_blocks_are_filled_with_zeros_and_cut_off() -> None:
    seen = []

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        seen.append((x.shape, y.shape, x[1:].sum().item()))
        return x + 1, y

    x, y = torch.arange(3.0)[:, None] + 1, torch.arange(3)
    plus, same = RowBlocks(2)(function, x, y)
    assert seen == [((2, 1), (2,), 2.0), ((2, 1), (2,), 0.0)]
    assert plus.tolist() == [[2.0], [3.0], [4.0]]
    assert same.tolist() == [0, 1, 2]


def test_a_requests_logits_do_not_depend_on_the_batch(
    tiny: KdaLanguageModel, requests_after_prompt: list[RequestState], device: str
) -> None:
    decoder = Decoder(tiny, device)
    tokens = torch.tensor([[1, 2], [3, 4], [5, 6]], device=device)

    def logits(live: list[int]) -> Tensor:
        pool = StatePool(
            decoder.shape, num_layers=TINY.num_layers, num_slots=3, max_batch=3, draft_tokens=2, mode="ring",
            dtype=ACTIVATION_DTYPE, device=device,
        )  # fmt: skip
        for slot, request in enumerate(requests_after_prompt):
            pool.load_slot(slot, request.conv_state, request.ssm_state)
        pool.begin(torch.tensor([i if i in live else -1 for i in range(3)], device=device), 2)
        return decoder.round_logits(pool, tokens, "fused+ring")

    together, alone = logits([0, 1, 2]), logits([1])
    assert same_bits(together[1], alone[1])
    assert not same_bits(together[0], alone[0])


def test_speculation_in_every_lane_equals_plain_decoding(
    tiny: KdaLanguageModel, requests_after_prompt: list[RequestState], device: str
) -> None:
    decoder = Decoder(tiny, device)
    progress: list[int] = []
    plain = decoder.decode(
        requests_after_prompt, lane="unfused", draft_tokens=1, num_bytes=7, on_progress=progress.append
    )
    assert progress == [3 * n for n in range(2, 8)]
    assert plain.rounds == 6
    assert plain.accepted == {1: 18}
    for lane in LANES:
        run = decoder.decode(requests_after_prompt, lane=lane, draft_tokens=3, num_bytes=7)
        assert run.texts == plain.texts, lane
        assert same_bits(run.ssm_state, plain.ssm_state), lane
        assert torch.equal(run.conv_state, plain.conv_state), lane
        assert run.faults is None
        assert sum(n * count for n, count in run.accepted.items()) == 18
        assert [len(marks) for marks in run.from_draft] == [7, 7, 7]


@pytest.mark.parametrize("round_tokens", [7, 256])
def test_the_pools_state_goes_on_where_the_prompt_ended(round_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "INGEST_TOKENS", round_tokens)
    # The same text, once as a whole in plain torch and once prompt by kernel: bf16 inputs and outputs apart, the same.
    model = make_model(TINY)
    decoder = Decoder(model, "cpu")
    request = ingest(model, PROMPTS[0])
    pool = StatePool(decoder.shape, num_layers=2, num_slots=1, max_batch=1, draft_tokens=1, mode="ring")
    pool.load_slot(0, request.conv_state, request.ssm_state)
    pool.begin(torch.tensor([0]), 1)
    ours = decoder.round_logits(pool, torch.tensor([[request.root]]), "reference")[0, 0]
    whole = model(torch.tensor([[0, *PROMPTS[0], request.root]]))[0, -1]
    # bf16 keeps 8 bits; a few roundings in a row stay within 3 % of the logits' size.
    assert (ours - whole).norm() < 0.03 * whole.norm()


def test_an_empty_prompt_is_refused(tiny: KdaLanguageModel) -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        ingest(tiny, b"")
