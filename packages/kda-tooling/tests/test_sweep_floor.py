"""The byte floor against sums done by hand."""

from __future__ import annotations

import pytest
import torch

from kda_kernels import KdaShape
from kda_tooling.bench.floor import Traffic, commit_traffic, fold_on_verify_traffic, verify_traffic

COPY = 4.3e12
ONE_HEAD = KdaShape(1, 1, 128, 128)
EIGHT_HEADS = KdaShape(8, 8, 128, 128)


def parameters(shape: KdaShape) -> int:
    """Bytes of a layer's parameters in 16-bit weights: 4 taps and a bias per channel; A_log and dt_bias in fp32."""
    channels = 2 * shape.num_heads * shape.head_k_dim + shape.num_v_heads * shape.head_v_dim
    return channels * 5 * 2 + shape.num_v_heads * 4 + shape.num_v_heads * shape.head_k_dim * 4


def test_verify_of_one_head_at_four_tokens() -> None:
    """K = V = 128, bf16: 86.3 KB a head, as the table of anchors says, parameters and the slot index left out."""
    state = 128 * 128 * 4
    conv_state = 3 * 384 * 2
    inputs = 4 * (384 + 128 + 1) * 2
    output = 4 * 128 * 2
    window = 4 * 3 * 384 * 2
    ring = 4 * (128 * 2 + 128 * 2 + 128 * 4 + 4)
    assert state + conv_state + inputs + output + window + ring == 86_296
    traffic = verify_traffic(ONE_HEAD, 1, 4, torch.bfloat16, "ring")
    assert traffic.read == state + conv_state + inputs + 4 + parameters(ONE_HEAD)
    assert traffic.written == output + window + ring


@pytest.mark.parametrize(("batch", "us"), [(1, 0.16), (4, 0.64), (16, 2.57), (64, 10.3), (256, 41.1)])
def test_verify_floor_at_a_copys_bandwidth(batch: int, us: float) -> None:
    traffic = verify_traffic(EIGHT_HEADS, batch, 4, torch.bfloat16, "ring")
    without_parameters = Traffic(traffic.read - parameters(EIGHT_HEADS) - 4 * batch, traffic.written)
    assert without_parameters.total == batch * 8 * 86_296
    assert without_parameters.microseconds(COPY) == pytest.approx(us, rel=0.01)
    # One layer's parameters weigh 5 % at B = 1 and nothing at B = 256.
    assert 1.0 < traffic.total / without_parameters.total < 1.001 + 0.06 / batch


def test_snapshots_are_64_kib_a_head_and_token_in_place_of_the_ring() -> None:
    ring = verify_traffic(EIGHT_HEADS, 3, 4, torch.bfloat16, "ring")
    snapshots = verify_traffic(EIGHT_HEADS, 3, 4, torch.bfloat16, "snapshots")
    assert snapshots.read == ring.read
    assert snapshots.written - ring.written == 3 * 4 * 8 * (65_536 - 1028)


def test_a_layer_without_bias_reads_none() -> None:
    with_bias = verify_traffic(EIGHT_HEADS, 3, 4, torch.bfloat16, "ring")
    without = verify_traffic(EIGHT_HEADS, 3, 4, torch.bfloat16, "ring", bias=False)
    assert (with_bias.read - without.read, without.written) == (8 * 384 * 2, with_bias.written)


def test_grouped_heads_share_k() -> None:
    """H = 4, HV = 8, K = 64, V = 128, fp16, two tokens of one request."""
    traffic = verify_traffic(KdaShape(4, 8, 64, 128), 1, 2, torch.float16, "ring")
    channels = 2 * 4 * 64 + 8 * 128
    state = 8 * 128 * 64 * 4 + 3 * channels * 2
    inputs = 2 * (channels + 8 * 64 + 8) * 2 + 4
    assert traffic.read == state + inputs + channels * 5 * 2 + 8 * 4 + 8 * 64 * 4
    ring = 8 * 128 * 2 + 4 * 64 * 2 + 8 * 64 * 4 + 8 * 4
    assert traffic.written == 2 * (8 * 128 * 2 + 3 * channels * 2 + ring)


def test_commit_floor_by_hand() -> None:
    """B = 64: the state read and written takes 15.6 us, with three ring records and the window 16.5 us."""
    state_only = Traffic(64 * 8 * 65_536, 64 * 8 * 65_536)
    assert state_only.microseconds(COPY) == pytest.approx(15.6, abs=0.05)
    traffic = commit_traffic(EIGHT_HEADS, 64, 3, torch.bfloat16, "ring")
    window, indices = 3 * 8 * 384 * 2, 8
    assert traffic.read == 64 * (8 * 65_536 + 3 * 8 * 1028 + window + indices)
    assert traffic.written == 64 * (8 * 65_536 + window)
    assert traffic.microseconds(COPY) == pytest.approx(16.5, abs=0.05)


def test_a_snapshot_commit_copies_one_snapshot_whatever_was_accepted() -> None:
    one, three = (commit_traffic(EIGHT_HEADS, 2, accept, torch.bfloat16, "snapshots") for accept in (1, 3))
    assert one == three
    assert one.read == 2 * (8 * 65_536 + 3 * 8 * 384 * 2 + 8)
    assert one.written == 2 * (8 * 65_536 + 3 * 8 * 384 * 2)


def test_a_round_that_folds_on_verify_reads_and_writes_the_state_once() -> None:
    """B = 64: 19.1 us, where verify and commit apart take 26.8."""
    arguments = EIGHT_HEADS, 64, 4, 3, torch.bfloat16
    traffic, apart = fold_on_verify_traffic(*arguments), verify_traffic(EIGHT_HEADS, 64, 4, torch.bfloat16, "ring")
    apart += commit_traffic(EIGHT_HEADS, 64, 3, torch.bfloat16, "ring")
    state, flags = 64 * 8 * 65_536, 64 * 8 * 16 * 4
    assert traffic.read == apart.read - state + flags
    assert traffic.written == apart.written + flags
    assert traffic.microseconds(COPY) == pytest.approx(19.1, abs=0.1)
    assert apart.microseconds(COPY) == pytest.approx(26.8, abs=0.1)


def test_compact_windows_are_not_written() -> None:
    """B = 64, T = 4: 10.3 us of verify become 9.2, and the commit's three columns are read elsewhere."""
    arguments = EIGHT_HEADS, 64, 4, torch.bfloat16, "ring"
    plain, compact = verify_traffic(*arguments), verify_traffic(*arguments, compact_window=True)
    assert compact.read == plain.read
    assert plain.written - compact.written == 64 * 4 * 3 * 8 * 384 * 2 - 24
    assert plain.microseconds(COPY) == pytest.approx(10.3, abs=0.1)
    assert compact.microseconds(COPY) == pytest.approx(9.2, abs=0.1)
    commits = [commit_traffic(EIGHT_HEADS, 64, 3, torch.bfloat16, "ring", compact) for compact in (False, True)]
    assert (commits[1].read - commits[0].read, commits[1].written) == (24, commits[0].written)
    folding = [
        fold_on_verify_traffic(EIGHT_HEADS, 64, 4, 3, torch.bfloat16, compact_window=option) for option in (False, True)
    ]
    assert folding[0].total - folding[1].total == 64 * 4 * 3 * 8 * 384 * 2 - 48


def test_traffic_adds_up() -> None:
    both = Traffic(3, 4) + Traffic(10, 20)
    assert (both.read, both.written, both.total) == (13, 24, 37)
    assert Traffic(1_000_000, 1_000_000).microseconds(1e12) == pytest.approx(2.0)
