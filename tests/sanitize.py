"""Every kernel once at small shapes, for compute-sanitizer: `nox -s sanitize` runs this under each of its tools.

Buffers stand between canaries and requests beside unowned slots (`tests.support.cases`), so a stray access that stays
within an allocation shows too: each outcome is compared with the portable kernel's, whole buffers and all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

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
from tests.support.cases import Case, Problem, make_problem
from tests.support.commits import fold_problem, verified

CASES = (
    Case(B=3, T=3, H=1, HV=2, K=64, padded=(1,), pitch=3, bias=False, dtype=torch.float16),
    Case(B=2, T=8, H=1, HV=1, K=128, lower_bound=-5.0, length=5),
)
CONFIGS = (PORTABLE, LONE_HEADS, FEW_HEADS, SOME_HEADS_STATE_FIRST, MANY_HEADS, MANY_HEADS_LONG_DRAFT)


def verifies(problem: Problem, config: LaunchConfig) -> Iterator[tuple[str, Problem]]:
    """(what, outcome) of every lane, record and form."""
    for op in (verify_fused, verify_unfused):
        for record, form in (("ring", "recurrent"), ("snapshots", "recurrent"), ("ring", "chunked")):
            yield f"{record} {form}", problem.run(op, record, config=config, form=form, indices_ready=True)


def batches(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """(what, outcome) of a ragged batch and of trees, in the lane that takes them."""
    case = problem.case
    starts = torch.arange(case.B + 1, dtype=torch.int32, device="cuda") * (case.T - 1)  # B rows belong to no request
    parents = (torch.arange(case.T, dtype=torch.int32, device="cuda") - 2).clamp(min=-1).repeat(case.B, 1)
    for record, options in (
        ("ring", {"starts": starts}),
        ("snapshots", {"starts": starts}),
        ("snapshots", {"parents": parents}),
    ):
        yield f"{record} {', '.join(options)}", problem.run(verify_unfused, record, **options)


def same(one: Problem, two: Problem) -> bool:
    """Equal in every bit of every buffer, canaries included."""
    return all(
        torch.equal(one.whole(name).view(torch.uint8), two.whole(name).view(torch.uint8)) for name in one.buffers
    )


def commits(problem: Problem) -> Iterator[tuple[str, bool]]:
    """Fold in every configuration, scatters, tracking; (what, whether the bits are right)."""
    accept = torch.arange(1, problem.case.B + 1, dtype=torch.int32, device="cuda").clamp(max=problem.case.L)
    expected = fold_problem(problem, accept, config=PORTABLE)
    for config in (FOLD_SHORT, FOLD_LONG):
        yield "fold", same(fold_problem(problem, accept, config=config), expected)
    common = {"slots": problem.slots, "accept_lens": accept, "draft_tokens": problem.case.T}
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


def main() -> int:
    """Run everything; 1 where bits differ."""
    wrong = []
    for case in CASES:
        problem = make_problem(case, "cuda")
        expected = dict(verifies(problem, PORTABLE))
        for config in CONFIGS:
            wrong += [
                f"{case.id} {config} {what}" for what, got in verifies(problem, config) if not same(got, expected[what])
            ]
        again = dict(batches(problem))  # twice: what is not written must not differ either
        wrong += [f"{case.id} {what}" for what, got in batches(problem) if not same(got, again[what])]
        wrong += [f"{case.id} {what}" for what, right in commits(verified(case, "cuda")) if not right]
    torch.cuda.synchronize()
    sys.stdout.write(
        "\n".join([*wrong, f"{len(CASES)} cases, {len(CONFIGS)} configurations, {len(wrong)} with other bits\n"])
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
