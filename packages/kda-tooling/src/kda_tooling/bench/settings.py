"""What a sweep is asked to do, checked before anything runs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kda_backend import LANES, lane_mode
from kda_backend.gate.cells import MOST_TUNED_TOKENS
from kda_kernels import FORMS, MAX_CHUNKED_TOKENS, KdaShape
from kda_tooling.names import LONG_NAMES

KINDS = ("verify", "round", "commit")
DTYPES: dict[str, torch.dtype] = {short: getattr(torch, name) for short, name in LONG_NAMES.items()}
MAX_BATCH = 4096
MAX_PASSES = 1001
MAX_HEADS = 1024
DEFAULT_SHAPE = KdaShape(8, 8, 128, 128)
DEFAULT_FORMS = ("recurrent",)


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Args:
        lanes: lanes to measure, of `kda_backend.LANES`.
        batch_sizes, draft_tokens: the cells are their product.
        shape: head layout.
        dtype: "bf16" or "fp16".
        lower_bound: None for the standard gate, else below 0.
        bias: whether the conv has a bias.
        forms: of `kda_kernels.FORMS`; ring lanes are measured in each, the others in the recurrent form.
        kind: "verify", "round" or "commit".
        accept: accept length of commits; None means T - 1 (at least 1).
        sweep_configs: measure the fused lanes in every launch configuration.
        hot: one argument set over and over, instead of rotating past the L2.
        passes: interleaved passes.
        peers: NAME=PATH of other projects' kernels.
        seed: of the random inputs.
        fold_on_verify: rounds of the ring lanes are also measured with fold on verify.
        compact_window: rounds of every lane are also measured with compact windows, with both where there is both.
        indices_ready: our lanes are told that the kernel before them writes no index (see `kda_kernels.verify_fused`).

    Raises:
        ValueError: a value is unknown, below its least, or impossible; the message names the option.
    """

    lanes: tuple[str, ...] = LANES
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    draft_tokens: tuple[int, ...] = (4,)
    shape: KdaShape = DEFAULT_SHAPE
    dtype: str = "bf16"
    lower_bound: float | None = -5.0
    bias: bool = True
    forms: tuple[str, ...] = DEFAULT_FORMS
    kind: str = "verify"
    accept: int | None = None
    sweep_configs: bool = False
    hot: bool = False
    passes: int = 9
    peers: tuple[str, ...] = ()
    seed: int = 0
    indices_ready: bool = False
    fold_on_verify: bool = False
    compact_window: bool = False

    def __post_init__(self) -> None:
        unknown = [lane for lane in self.lanes if lane not in LANES]
        if unknown or not self.lanes:
            raise ValueError(f"--modes must name lanes of {', '.join(LANES)}; got {', '.join(unknown) or 'none'}")
        for option, values, most in (
            ("--batch-sizes", self.batch_sizes, MAX_BATCH), ("--draft-tokens", self.draft_tokens, MOST_TUNED_TOKENS),
        ):  # fmt: skip
            wrong = [str(value) for value in values if not 1 <= value <= most]
            if wrong or not values:
                raise ValueError(f"{option} must be within 1..{most}; got {', '.join(wrong) or 'none'}")
        if self.shape.num_v_heads > MAX_HEADS:  # a multiple of the query heads, so never fewer
            raise ValueError(f"--hv-heads (default: --heads) must be at most {MAX_HEADS}; got {self.shape.num_v_heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if self.lower_bound is not None and not -math.inf < self.lower_bound < 0:
            raise ValueError(
                f"--lower-bound must be finite and below 0, or 'none' for the standard gate; got {self.lower_bound}"
            )
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {self.kind!r}")
        if not 3 <= self.passes <= MAX_PASSES or self.passes % 2 == 0:
            raise ValueError(
                f"--passes must be odd, so that the median is a pass, and within 3..{MAX_PASSES}; got {self.passes}"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"--seed must be at least 0 and below 2**63; got {self.seed}")
        self._check_forms()
        self._check_kind()
        self._check_peers()

    def _check_forms(self) -> None:
        """Every lane has a form to be measured in, and every form a lane."""
        unknown = [form for form in self.forms if form not in FORMS]
        if unknown or not self.forms:
            raise ValueError(f"--form must be of {', '.join(FORMS)}; got {', '.join(unknown) or 'none'}")
        if "chunked" not in self.forms:
            return
        without = [lane for lane in self.lanes if lane_mode(lane) != "ring"]
        if len(without) == len(self.lanes) or (without and self.forms == ("chunked",)):
            raise ValueError(
                f"--form chunked is of ring lanes: leave {', '.join(without)} out of --modes or add the recurrent form"
            )
        if max(self.draft_tokens) > MAX_CHUNKED_TOKENS:
            raise ValueError(
                f"--form chunked takes at most {MAX_CHUNKED_TOKENS} draft tokens; --draft-tokens has "
                f"{max(self.draft_tokens)}"
            )
        if self.kind == "commit":
            raise ValueError("--form varies the verify kernels, and --commit times none: leave one of them out")

    def _check_kind(self) -> None:
        """What is asked must have an effect on what is measured."""
        if self.fold_on_verify:
            if self.kind != "round":
                raise ValueError("--fold-on-verify moves work from commit to verify: give --round, which times both")
            if not any(lane_mode(lane) == "ring" for lane in self.lanes):
                raise ValueError(f"--fold-on-verify is of ring lanes, and --modes names none: {', '.join(self.lanes)}")
        if self.compact_window and self.kind != "round":
            raise ValueError("--compact-window moves work from verify to commit: give --round, which times both")
        if self.indices_ready and self.kind == "commit":
            raise ValueError("--indices-ready is of verify, and --commit times none: leave one of them out")
        if self.accept is not None:
            if self.kind == "verify":
                raise ValueError("--accept is the length of a commit: give --round or --commit with it")
            if not 1 <= self.accept <= min(self.draft_tokens):
                raise ValueError(
                    f"--accept must be within 1..{min(self.draft_tokens)} (the smallest draft length); "
                    f"got {self.accept}"
                )
        if self.sweep_configs:
            if self.kind == "commit":
                raise ValueError("--sweep-bv varies the verify kernels, and --commit times none: leave one of them out")
            if not any(lane.startswith("fused") for lane in self.lanes):
                raise ValueError(f"--sweep-bv varies the fused lanes, and --modes names none: {', '.join(self.lanes)}")

    def _check_peers(self) -> None:
        names = [spec.partition("=")[0] for spec in self.peers]
        for spec in self.peers:
            name, separator, path = spec.partition("=")
            if not separator or not name or not Path(path).is_dir():
                raise ValueError(f"--peer must be NAME=FOLDER of an existing folder; got {spec!r}")
        if len(set(names)) < len(names):
            raise ValueError(f"--peer must name each peer once; got {', '.join(names)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The activation dtype."""
        return DTYPES[self.dtype]

    def accept_for(self, draft_tokens: int) -> int:
        """Accept length of commits at ``draft_tokens``."""
        return max(1, draft_tokens - 1) if self.accept is None else self.accept

    def cells(self) -> list[tuple[int, int]]:
        """(T, B) in the order of measurement."""
        return list(itertools.product(self.draft_tokens, self.batch_sizes))


def command_of(settings: dict[str, Any]) -> str:
    """The `kda sweep` call that gives these settings, which are those of a result's JSON: defaults left out.

    A peer is stored without its folder; the call names ``peer/``.
    """
    default = SweepSettings()
    shape = settings["shape"]
    words = ["kda", "sweep"]

    def add(option: str, value: object, usual: object) -> None:
        if value != usual:
            words.extend([option, *map(str, value if isinstance(value, list) else [value])])

    add("--modes", settings["lanes"], list(default.lanes))
    add("--batch-sizes", settings["batch_sizes"], list(default.batch_sizes))
    add("--draft-tokens", settings["draft_tokens"], list(default.draft_tokens))
    add("--heads", shape["num_heads"], default.shape.num_heads)
    add("--hv-heads", shape["num_v_heads"], shape["num_heads"])
    add("--head-k-dim", shape["head_k_dim"], default.shape.head_k_dim)
    add("--head-v-dim", shape["head_v_dim"], default.shape.head_v_dim)
    bound = settings["lower_bound"]
    add("--lower-bound", "none" if bound is None else bound, default.lower_bound)
    add("--dtype", settings["dtype"], default.dtype)
    words += [] if settings["bias"] else ["--no-bias"]
    add("--form", settings.get("forms", list(DEFAULT_FORMS)), list(DEFAULT_FORMS))
    words += ["--sweep-bv"] if settings["sweep_configs"] else []
    words += [] if settings["kind"] == "verify" else [f"--{settings['kind']}"]
    add("--accept", settings["accept"], None)
    words += ["--hot"] if settings["hot"] else []
    words += ["--indices-ready"] if settings.get("indices_ready") else []
    words += ["--fold-on-verify"] if settings.get("fold_on_verify") else []
    words += ["--compact-window"] if settings.get("compact_window") else []
    add("--passes", settings["passes"], default.passes)
    add("--seed", settings["seed"], default.seed)
    if settings["peers"]:
        words += ["--peer", *(f"{name}=peer" for name in settings["peers"])]
    return " ".join(words)
