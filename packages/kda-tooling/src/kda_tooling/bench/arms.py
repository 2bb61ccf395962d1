"""The arms of a comparison: our lanes with a launch configuration, and a peer's, as functions of a problem.

Ours make the calls that `kda_backend.StatePool` makes: faults are counted, the unfused lane has its workspace, and the
commit is the pool's own function. What is timed is what is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from kda_backend import LANES, commit_layers, lane_mode
from kda_kernels import FORMS, KdaShape, LaunchConfig, verify_fused, verify_unfused
from kda_kernels.shapes import SUPPORTED_BLOCK_V, SUPPORTED_NUM_WARPS, SUPPORTED_ROWS_PER_THREAD
from kda_tooling.peers import Peer
from kda_tooling.problem import Problems, VerifyProblem

OURS = "kda"
RECURRENT = FORMS[0]
FOLD_ON_VERIFY = "fold-on-verify"
COMPACT = "compact"
MAX_STATE_REGISTERS = 128
"""Configurations whose state tile takes more registers per thread than this are not swept: they spill."""


@dataclass(frozen=True)
class Arm:
    """One measured variant.

    Args:
        name: unique in the run, e.g. "kda fused+ring" or "sglang fused+ring bv16".
        owner: "kda" or the peer's name.
        lane: one of `kda_backend.LANES`; for an arm of `commit_arms`, its mode.
        mode: "ring" or "snapshots": what the arm records and commits.
        verify: runs one layer's verify; returns [B*T, HV, V].
        commit: commits all layers of ``problems`` in place.
        config: launch configuration of verify; None for the kernels' own choice, and for a peer.
        form: one of `kda_kernels.FORMS`.
        fold_on_verify: verify replays what the last round accepted, and commit only writes down how much that is.
        compact_window: verify writes no conv windows, and commit takes the conv states from verify's inputs.
    """

    name: str
    owner: str
    lane: str
    mode: str
    verify: Callable[[VerifyProblem], torch.Tensor]
    commit: Callable[[Problems, torch.Tensor], None]
    config: LaunchConfig | None = None
    form: str = RECURRENT
    fold_on_verify: bool = False
    compact_window: bool = False

    @property
    def column(self) -> str:
        """The lane, with what is not usual of it: arms of one column can stand for each other."""
        form = "" if self.form == RECURRENT else f" {self.form}"
        return self.lane + form + _options(self)


def _options(arm: Arm) -> str:
    """What an arm does that is not usual, for its name."""
    return (f" {FOLD_ON_VERIFY}" if arm.fold_on_verify else "") + (f" {COMPACT}" if arm.compact_window else "")


def launch_configs(shape: KdaShape, nvidia: bool = False) -> list[LaunchConfig]:
    """Every tile, warp count and layout that can be named for ``shape`` and keeps its state tile in registers.

    ``nvidia``: with the layouts of verify's Gluon kernel. ``max_registers`` is left to the compiler.
    """
    return [
        LaunchConfig(block_v=block_v, num_warps=warps, rows_per_thread=rows)
        for rows in (None, *(SUPPORTED_ROWS_PER_THREAD if nvidia else ()))
        for block_v in SUPPORTED_BLOCK_V
        for warps in SUPPORTED_NUM_WARPS
        if block_v <= shape.head_v_dim and block_v * shape.head_k_dim // (32 * warps) <= MAX_STATE_REGISTERS
        if rows is None or block_v % (4 * warps * rows) == 0
    ]


def config_name(config: LaunchConfig | None) -> str:
    """bv64.w4.r4.m128.e: tile, warps, rows per thread, register cap, state first. None: "default".

    p: prefetch; t: token blocks.
    """
    if config is None:
        return "default"
    parts = [f"bv{config.block_v}", f"w{config.num_warps}"]
    parts += [f"r{config.rows_per_thread}"] if config.rows_per_thread is not None else []
    parts += [f"m{config.max_registers}"] if config.max_registers is not None else []
    parts += ["e"] if config.state_first else []
    parts += ["p"] if config.prefetch else []
    parts += ["t"] if config.token_blocks else []
    return ".".join(parts)


def _suffix(config: LaunchConfig | None) -> str:
    """What tells a swept arm's name from the default's."""
    return "" if config is None else f" {config_name(config)}"


def _verify(
    lane: str, form: str, config: LaunchConfig | None, indices_ready: bool, folds: bool, compact: bool
) -> Callable[[VerifyProblem], torch.Tensor]:
    op = verify_fused if lane.startswith("fused") else verify_unfused

    def run(p: VerifyProblem) -> torch.Tensor:
        return op(
            p.mixed_qkv, p.a, p.b, shape=p.shape, params=p.params, state=p.compact if compact else p.state,
            record=p.folding.banks if folds else p.record(lane_mode(lane)),
            pending=p.folding.pending if folds else None, slots=p.slots,
            draft_tokens=p.draft_tokens, config=config, errors=p.errors, workspace=p.workspace,
            form=form, indices_ready=indices_ready,
        )  # fmt: skip

    return run


def _commit(mode: str, folds: bool, compact: bool) -> Callable[[Problems, torch.Tensor], None]:
    def run(problems: Problems, accept_lens: torch.Tensor) -> None:
        first = problems.layers[0]
        commit_layers(
            problems.compact if compact else problems.state,
            problems.folding.banks if folds else problems.record(mode), shape=first.shape,
            slots=first.slots, accept_lens=accept_lens,
            draft_tokens=first.draft_tokens, errors=first.errors, uncounted=first.errors,
            pending=problems.folding.pending if folds else None,
            mixed_qkv=[problem.mixed_qkv for problem in problems.layers],
        )  # fmt: skip

    return run


def our_arms(
    shape: KdaShape,
    lanes: Iterable[str],
    sweep_configs: bool,
    nvidia: bool = False,
    forms: Iterable[str] = (RECURRENT,),
    indices_ready: bool = False,
    fold_on_verify: bool = False,
    compact_window: bool = False,
) -> list[Arm]:
    """Our lanes in each form that they have, in the default configuration or (fused lanes) in every one.

    ``fold_on_verify``: ring lanes also with it; ``compact_window``: every lane also with it, and ring lanes with both.
    """
    arms = []
    for form, lane, folds, compact in itertools.product(
        forms, lanes, (False, True) if fold_on_verify else (False,), (False, True) if compact_window else (False,)
    ):
        if lane not in LANES:
            raise ValueError(f"lane must be one of {', '.join(LANES)}; got {lane!r}")
        mode = lane_mode(lane)
        if mode != "ring" and (form != RECURRENT or folds):
            continue
        configs: list[LaunchConfig | None] = [None]
        if sweep_configs and lane.startswith("fused"):
            configs += launch_configs(shape, nvidia)
        for config in configs:
            verify = _verify(lane, form, config, indices_ready, folds, compact)
            arm = Arm("", OURS, lane, mode, verify, _commit(mode, folds, compact), config, form, folds, compact)
            arms.append(replace(arm, name=f"{OURS} {arm.column}{_suffix(config)}"))
    return arms


def with_config(arm: Arm, config: LaunchConfig | None) -> Arm:
    """An arm of ours, in the recurrent or chunked form, launched with ``config``."""
    verify = _verify(arm.lane, arm.form, config, False, arm.fold_on_verify, arm.compact_window)
    return replace(arm, name=f"{OURS} {arm.column}{_suffix(config)}", config=config, verify=verify)


def peer_arms(peer: Peer, problem: VerifyProblem) -> list[Arm]:
    """The peer's lanes that take ``problem``."""

    def commit(problems: Problems, accept_lens: torch.Tensor) -> None:
        peer.commit(
            problems.state.ssm_state, problems.record("ring"), problems.state.conv_state, problems.state.windows,
            problems.layers[0].slots, accept_lens,
        )  # fmt: skip

    return [
        Arm(f"{peer.name} {name}", peer.name, name.split()[0], "ring", verify, commit)
        for name, verify in peer.verify_arms(problem).items()
    ]


def commit_arms(arms: Iterable[Arm]) -> list[Arm]:
    """One arm per owner and mode, named after them: how verify was done makes no difference to a commit.

    Fold on verify, which leaves less to a commit, is a mode here, and so are compact windows, which leave more.
    """
    unique: dict[tuple[str, str], Arm] = {}
    for arm in arms:
        unique.setdefault((arm.owner, arm.mode + _options(arm)), arm)
    return [
        replace(arm, name=f"{owner} {mode} commit", lane=arm.mode, form=RECURRENT)
        for (owner, mode), arm in unique.items()
    ]
