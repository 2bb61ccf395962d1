"""Do the arms agree? Checked before anything is timed: records and outputs of verify, states after commit."""

from __future__ import annotations

import torch

from kda_kernels import Ring
from kda_tooling.bench.arms import OURS, RECURRENT, Arm, commit_arms
from kda_tooling.problem import Problems, VerifyProblem

OUTPUT_TOLERANCE = 1e-3
"""Relative norm of a peer's output against ours: other summation orders flip last places of 16-bit outputs."""

STATE_TOLERANCE = 1e-5
"""Relative norm of a peer's committed fp32 state against ours: other summation orders differ by a few ulps, 1e-7 each.
A token too many or too few, or a wrong slot, is off by 1e-2 and more."""

POISON = 3.0
"""What every buffer that an arm must write is filled with before."""


class BitsDifferError(RuntimeError):
    """Arms that must agree bit for bit do not; nothing was timed."""


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


def _unlike(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """In how many values; all of them where shapes differ."""
    if one.shape != other.shape:
        return torch.full((), one.numel(), device=one.device)
    return (_bits(one) != _bits(other)).sum()


def _written(problem: VerifyProblem, arm: Arm) -> dict[str, torch.Tensor]:
    record = problem.folding.banks if arm.fold_on_verify else problem.record(arm.mode)
    tensors = {} if arm.compact_window else {"conv_window": problem.state.windows}
    if isinstance(record, Ring):
        slots = problem.state.ssm_state.shape[0]  # the bank that a reset problem's verify writes
        tensors |= {name: getattr(record, name)[:slots] for name in ("raw_v", "raw_k", "g", "beta")}
    else:
        tensors["snapshots"] = record.states
    return tensors


class _Expected:
    """The first arm's value of each tensor, which the following arms' are compared with."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str, torch.Tensor]] = {}

    def equal(self, arm: Arm, **tensors: torch.Tensor) -> None:
        """Same bits as the first arm's, or `BitsDifferError`; the device is waited for once."""
        first = {name: self._first.setdefault(name, (arm.name, t.clone())) for name, t in tensors.items()}
        counts = [_unlike(t, first[name][1]) for name, t in tensors.items()]
        for (name, t), count in zip(tensors.items(), torch.stack(counts).tolist(), strict=True):
            if count:
                raise BitsDifferError(
                    f"{arm.name}: {name} differs from that of {first[name][0]} in {count} of {t.numel()} values"
                )

    def close(self, arm: Arm, name: str, tensor: torch.Tensor, tolerance: float) -> None:
        """Within a relative distance in norm of the first arm's, or `BitsDifferError`."""
        owner, first = self._first.setdefault(name, (arm.name, tensor.clone()))
        relative = float((tensor.float() - first.float()).norm() / first.float().norm())
        if not relative < tolerance:  # NaN is refused too
            raise BitsDifferError(
                f"{arm.name}: {name} differs from that of {owner} by {relative:.1e} in norm; allowed is {tolerance}"
            )


class BitsCheck:
    """Runs arms on one problem's poisoned buffers and compares what they write: records, windows, outputs of ours.

    ``state.conv_state`` is restored after each arm: SGLang's unfused lane rolls it.

    Args:
        problem: one layer.
        first: what the others are compared with, one of ours in the recurrent form unless all have another; it is run
            once, before the first of them.
    """

    def __init__(self, problem: VerifyProblem, first: Arm) -> None:
        self._problem, self._first = problem, first
        self._conv_state: torch.Tensor | None = None
        self._expected = _Expected()

    def run(self, arm: Arm) -> None:
        """Compare ``arm`` with those before it.

        Outputs of another form than the recurrent one are equal among themselves; they and a peer's are compared with
        ours within `OUTPUT_TOLERANCE`.

        Raises:
            BitsDifferError: it differs; the message names both arms and the tensor.
        """
        if self._conv_state is None:
            conv_state = self._problem.state.conv_state.clone()
            self._compare(self._first, conv_state)
            self._conv_state = conv_state  # only now: nothing may take the place of a first one that failed
        if arm is not self._first:
            self._compare(arm, self._conv_state)

    def _compare(self, arm: Arm, conv_state: torch.Tensor) -> None:
        problem, expected = self._problem, self._expected
        tensors = _written(problem, arm)
        for tensor in tensors.values():
            tensor.fill_(POISON)
        if arm.fold_on_verify:
            problem.folding.reset()
        if arm.compact_window:
            problem.state.windows.fill_(POISON)
        out = arm.verify(problem)
        if arm.compact_window and not (problem.state.windows == POISON).all():
            raise BitsDifferError(f"{arm.name}: conv_window was written, which it must not be")
        problem.state.conv_state.copy_(conv_state)
        if arm.owner == OURS:
            tensors["output" if arm.form == RECURRENT else f"{arm.form} output"] = out
        expected.equal(arm, **tensors)
        if arm.owner != OURS or arm.form != RECURRENT:
            expected.close(arm, "output", out, OUTPUT_TOLERANCE)


def check_bits(problem: VerifyProblem, arms: list[Arm]) -> None:
    """Run every arm once and compare them all, as `BitsCheck` does. Raises `BitsDifferError`."""
    # What others are compared with comes first: ours, the recurrent form before the other.
    ordered = sorted(arms, key=lambda arm: (arm.owner != OURS, arm.form != RECURRENT))
    check = BitsCheck(problem, ordered[0])
    for arm in ordered:
        check.run(arm)


def check_commits(problems: Problems, arms: list[Arm], accept_lens: torch.Tensor) -> None:
    """Commit each owner's and mode's own records of all layers once, and compare conv and recurrent states.

    Ours must agree bit for bit, ring with snapshots; a peer's recurrent state within `STATE_TOLERANCE`. The states are
    restored; the records of every mode stay filled, so that commits can be timed afterwards.

    Raises:
        BitsDifferError: an arm differs; the message names both arms and the tensor.
    """
    state = problems.state
    before = state.conv_state.clone(), state.ssm_state.clone()
    expected = _Expected()
    for arm in commit_arms(arms):
        if arm.fold_on_verify:
            problems.folding.reset()
        if arm.compact_window and problems.compact.kept_inputs is not None:
            problems.compact.kept_inputs.zero_()  # no rows: a commit of what was not noted leaves the states alone
        for problem in problems.layers:
            arm.verify(problem)
        state.conv_state.copy_(before[0])
        arm.commit(problems, accept_lens)
        if arm.fold_on_verify:
            problems.flush()
        expected.equal(arm, conv_state=state.conv_state)
        if arm.owner == OURS:
            expected.equal(arm, ssm_state=state.ssm_state)
        else:
            expected.close(arm, "ssm_state", state.ssm_state, STATE_TOLERANCE)
        state.conv_state.copy_(before[0])
        state.ssm_state.copy_(before[1])
