"""Every kernel once at small shapes, for compute-sanitizer: `nox -s sanitize` runs this under each of its tools.

Buffers stand between canaries and requests beside unowned slots (`tests.support.cases`), so a stray access that stays
within an allocation shows too: each outcome is compared with the portable kernel's, whole buffers and all.

``--jobs N`` spreads the checks over N processes, which fills Triton's disk cache sooner than one.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from kda_kernels import LaunchConfig, scatter_conv, scatter_snapshots, verify_fused, verify_unfused
from kda_kernels.buffers import Snapshots
from kda_kernels.defaults import (
    FEW_HEADS,
    FOLD_LONG,
    FOLD_SHORT,
    LONE_HEADS,
    MANY_HEADS,
    MANY_HEADS_LONG_DRAFT,
    PORTABLE,
    SOME_HEADS_STATE_FIRST,
)
from tests.support.bits import as_bits
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import fold_problem, verified
from tests.support.compact import WRITTEN as COMPACT_WRITTEN
from tests.support.compact import Compact, with_pitch
from tests.support.pending import Rounds

CASES = (
    Case(B=3, T=3, H=1, HV=2, K=64, padded=(1,), pitch=3, bias=False, dtype=torch.float16),
    Case(B=2, T=8, H=1, HV=1, K=128, lower_bound=-5.0, length=5),
)
IN_BLOCKS = replace(MANY_HEADS, token_blocks=True)
CONFIGS = (PORTABLE, LONE_HEADS, FEW_HEADS, SOME_HEADS_STATE_FIRST, MANY_HEADS, MANY_HEADS_LONG_DRAFT, IN_BLOCKS)
FOLDING = (PORTABLE, FEW_HEADS, MANY_HEADS, MANY_HEADS_LONG_DRAFT)
"""Of verify with a pending fold."""

Op = Callable[..., torch.Tensor]
DEVICE = "cuda"
problem_of = functools.cache(functools.partial(make_problem, device=DEVICE))


def same(one: Problem, two: Problem) -> bool:
    """Equal in every bit of every buffer, canaries included."""
    return all(
        torch.equal(one.whole(name).view(torch.uint8), two.whole(name).view(torch.uint8)) for name in one.buffers
    )


@functools.cache
def portable(case: Case, op: Op, record: str, form: str) -> Problem:
    """The outcome that the other configurations must have."""
    return problem_of(case).run(op, record, config=PORTABLE, form=form, indices_ready=True)


def verifies(case: Case, op: Op, record: str, form: str, config: LaunchConfig) -> Iterator[tuple[str, bool]]:
    """One lane, record and form in one configuration; (what, whether the bits are right)."""
    got = problem_of(case).run(op, record, config=config, form=form, indices_ready=True)
    yield f"{op.__name__} {record} {form} {config}", same(got, portable(case, op, record, form))


def batches(case: Case) -> Iterator[tuple[str, bool]]:
    """Ragged batches and trees, in the lane that takes them; twice: what is not written must not differ either.

    Trees of ranges longer than T, which only the device sees, are read up to T.
    """
    starts = torch.arange(case.B + 1, dtype=torch.int32, device=DEVICE) * (case.T - 1)  # B rows belong to no request
    parents = (torch.arange(case.T, dtype=torch.int32, device=DEVICE) - 2).clamp(min=-1).repeat(case.B, 1)
    for record, options in (
        ("ring", {"starts": starts}),
        ("snapshots", {"starts": starts}),
        ("snapshots", {"parents": parents}),
        ("snapshots", {"parents": parents, "starts": starts * case.T}),
    ):
        one, two = (problem_of(case).run(verify_unfused, record, **options) for _ in range(2))
        yield f"{record} {', '.join(options)}", same(one, two)


def commits(case: Case) -> Iterator[tuple[str, bool]]:
    """Fold in every configuration, scatters, tracking."""
    problem = verified(case, DEVICE)
    accept = torch.arange(1, case.B + 1, dtype=torch.int32, device=DEVICE).clamp(max=case.L)
    expected = fold_problem(problem, accept, config=PORTABLE)
    for config in (FOLD_SHORT, FOLD_LONG):
        yield f"fold {config}", same(fold_problem(problem, accept, config=config), expected)
    common = {"slots": problem.slots, "accept_lens": accept, "draft_tokens": case.T}
    track = torch.full_like(accept, -1), torch.zeros_like(accept)
    outcome = problem.fork()
    scatter_conv(
        outcome["conv_state"][None], outcome["conv_window"][None], track_slots=track[0], track_steps=track[1], **common
    )
    scatter_snapshots(outcome["ssm_state"][None], Snapshots(outcome["snapshots"][None]), **common)
    yield (
        "scatter",
        same(outcome.fork(buffers=outcome.buffers | {"conv_state": expected.buffers["conv_state"]}), expected),
    )


def folding(case: Case, op: Op, form: str, config: LaunchConfig) -> Iterator[tuple[str, bool]]:
    """Rounds that fold on verify and a flush, beside rounds that fold at commit."""
    rounds, ends = Rounds(case, DEVICE, op), [min(case.T, case.L), 1, 0][: case.B]
    try:
        for accept in (ends, ends[::-1]):
            rounds.round(accept, config=config, form=form, indices_ready=True)
        rounds.flush()
        rounds.assert_same_states()
    except AssertionError:
        yield f"{op.__name__} {form} pending {config}", False


def folding_ragged(case: Case) -> Iterator[tuple[str, bool]]:
    """A ragged round that folds on verify, then one whose commit tracks, which flushes."""
    rounds = Rounds(case, DEVICE)
    starts = torch.arange(case.B + 1, dtype=torch.int32, device=DEVICE) * (case.T - 1)
    spare = sorted(set(range(case.B + case.spare_slots)) - set(rounds.slots.tolist()))
    track = torch.tensor([spare[0], *[-1] * (case.B - 1)], device=DEVICE)
    try:
        rounds.round([1] * case.B)
        rounds.draw()
        rounds.verify(starts=starts)
        rounds.commit([2] * case.B, starts=starts, track_slots=track, track_steps=torch.zeros_like(track))
        rounds.assert_same_states()
    except AssertionError:
        yield "ragged pending", False


def compact(case: Case, op: Op, record: str, config: LaunchConfig) -> Iterator[tuple[str, bool]]:
    """A verify that notes its inputs, columns of a wider tensor, and the gather from there, beside the windows' way."""
    problem = problem_of(case).fork()
    problem.mixed_qkv = with_pitch(problem.mixed_qkv, 8 if config is PORTABLE else 5)
    both = Compact(case, DEVICE, op, record, problem, config=config, indices_ready=True)
    right = all(torch.equal(as_bits(both.ours.whole(n)), as_bits(both.plain.whole(n))) for n in COMPACT_WRITTEN)
    spare = sorted(set(range(case.B + case.spare_slots)) - set(problem.slots.tolist()))
    track = torch.tensor([spare[0], *[-1] * (case.B - 1)], device=DEVICE)
    for accept in ([case.T, 1, 2], [2, case.T, 0]):
        lengths = torch.tensor(accept[: case.B], device=DEVICE)
        plain, ours = both.commit(lengths, track_slots=track, track_steps=torch.ones_like(track))
        right &= torch.equal(as_bits(ours.whole("conv_state")), as_bits(plain.whole("conv_state")))
    yield f"{op.__name__} {record} compact {config}", right


def compact_ragged(case: Case) -> Iterator[tuple[str, bool]]:
    """A ragged verify that notes its inputs, and a gather whose ranges end past them."""
    starts = torch.arange(case.B + 1, dtype=torch.int32, device=DEVICE) * (case.T - 1)
    both = Compact(case, DEVICE, verify_unfused, "ring", problem_of(case), starts=starts)
    lengths = torch.full((case.B,), case.T - 1, device=DEVICE)
    plain, ours = both.commit(lengths)
    yield "ragged compact", torch.equal(as_bits(ours.whole("conv_state")), as_bits(plain.whole("conv_state")))
    _, past = both.commit(lengths, starts=starts + case.B * case.T)
    yield (
        "ragged compact, past the batch",
        torch.equal(as_bits(past.whole("conv_state")), as_bits(both.ours.whole("conv_state"))),
    )


def checks() -> tuple[list[functools.partial[Any]], list[functools.partial[Any]]]:
    """Every check: those that compile the portable kernels, and then those that compare with them."""
    lanes = [(op, form) for op in (verify_fused, verify_unfused) for form in ("recurrent", "chunked")]
    first, then = [], []
    for case in CASES:
        for config in CONFIGS:
            kinds = [*(("ring", *lane) for lane in lanes), *(("snapshots", *lane) for lane in lanes[::2])]
            if config is IN_BLOCKS:  # which the chunked form alone has
                kinds = [kind for kind in kinds if kind[2] == "chunked"]
            own = [functools.partial(verifies, case, op, record, form, config) for record, op, form in kinds]
            (first if config is PORTABLE else then).extend(own)
        then += [functools.partial(batches, case), functools.partial(commits, case)]
        then += [functools.partial(folding, case, *lane, config) for config in FOLDING for lane in lanes]
        then.append(functools.partial(folding_ragged, case))
        then += [
            functools.partial(compact, case, op, record, config)
            for config in (PORTABLE, FEW_HEADS, MANY_HEADS_LONG_DRAFT)
            for op in (verify_fused, verify_unfused)
            for record in ("ring", "snapshots")
        ]
        then.append(functools.partial(compact_ragged, case))
    return first, then


def wrong_in(check: functools.partial[Iterator[tuple[str, bool]]]) -> list[str]:
    """What has other bits, by the case and what was run."""
    found = [f"{check.args[0].id} {what}" for what, right in check() if not right]
    torch.cuda.synchronize()
    return found


def main(jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1) -> None:
    """Run everything; exit status 1 where bits differ."""
    every, wrong = checks(), []
    for some in every:
        if jobs == 1:
            wrong += [one for check in some for one in wrong_in(check)]
        else:
            with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
                wrong += [one for found in pool.map(wrong_in, some) for one in found]
    sys.stdout.write("\n".join([*wrong, f"{sum(map(len, every))} checks, {len(wrong)} with other bits\n"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
