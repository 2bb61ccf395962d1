"""One measured cell of a gate table: every lane's figures at one T and B, and the verdict that they support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

from kda_backend.lanes import MODES, lanes_of
from kda_kernels import FORMS, MAX_CHUNKED_TOKENS, LaunchConfig
from kda_kernels.shapes import MAX_GLUON_CHUNKED_TOKENS

GATES = ("safe", "standard")
"""Gates of the delta rule: with a lower bound, and without."""

FOLD_ON_VERIFY, COMPACT_WINDOW = "fold-on-verify", "compact-window"
OPTIONS = ("plain", FOLD_ON_VERIFY, COMPACT_WINDOW, f"{FOLD_ON_VERIFY}+{COMPACT_WINDOW}")
"""Options of a pool. All but "plain" move work between verify and commit, so there a whole round decides."""

LEAST_PASSES = 2
MOST_PASSES = 64
DECIMALS = 3
"""Of microseconds in a table, that is, nanoseconds; below what two passes agree to."""

MOST_US = 1e9
MOST_BATCH = 1 << 20
MOST_DRAFT_TOKENS = 1 << 12
MOST_TUNED_TOKENS = 64
"""The largest T that `kda tune` measures."""


def option_name(*, fold_on_verify: bool = False, compact_window: bool = False) -> str:
    """The one of `OPTIONS` that a pool with these settings has."""
    chosen = [FOLD_ON_VERIFY] * fold_on_verify + [COMPACT_WINDOW] * compact_window
    return "+".join(chosen) or OPTIONS[0]


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """ValueError unless ``value``, called ``name``, is one of the words ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}")


def whole(name: str, value: object, least: int, most: int) -> None:
    """TypeError or ValueError unless ``value``, called ``name``, is a whole number within ``least``..``most``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be within {least}..{most}, got {value}")


def one_line(name: str, value: object, most: int = 400) -> None:
    """TypeError or ValueError unless ``value``, called ``name``, is one line of printable text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be text, got {type(value).__name__}")
    if not value or len(value) > most or not value.isprintable():
        raise ValueError(f"{name} must be 1..{most} printable characters, got {value[:60]!r}")


@dataclass(frozen=True, order=True)
class CellKey:
    """What a cell was measured for.

    Args:
        gate: one of `GATES`.
        form: one of `kda_kernels.FORMS`.
        mode: one of `kda_backend.MODES`.
        option: one of `OPTIONS`.
        draft_tokens: T, the root included.
        batch: B, requests.

    Raises:
        TypeError, ValueError: a value is none of these, or no kernel takes the combination.
    """

    gate: str
    form: str
    mode: str
    option: str
    draft_tokens: int
    batch: int

    def __post_init__(self) -> None:
        one_of("gate", self.gate, GATES)
        one_of("form", self.form, FORMS)
        one_of("mode", self.mode, MODES)
        one_of("option", self.option, OPTIONS)
        whole("T", self.draft_tokens, 1, MOST_DRAFT_TOKENS)
        whole("B", self.batch, 1, MOST_BATCH)
        if self.form == "chunked" and self.mode != "ring":
            raise ValueError("form 'chunked' goes with mode 'ring' only: it never computes what snapshots hold")
        if self.form == "chunked" and self.draft_tokens > MAX_CHUNKED_TOKENS:
            raise ValueError(f"form 'chunked' takes T up to {MAX_CHUNKED_TOKENS}, got {self.draft_tokens}")
        if FOLD_ON_VERIFY in self.option and self.mode != "ring":
            raise ValueError(f"option {self.option!r} goes with mode 'ring' only: snapshots are never folded")

    def __str__(self) -> str:
        return f"{self.gate} gate, {self.form}, {self.mode}, {self.option}, T={self.draft_tokens}, B={self.batch}"


def is_time(value: float | None) -> TypeGuard[float]:
    """Whether a table may hold ``value`` as microseconds: above 0 also once it is rounded to `DECIMALS`."""
    return value is not None and 0 < value <= MOST_US and round(float(value), DECIMALS) > 0


def _figures(name: str, values: object) -> tuple[float, ...]:
    """``values`` as microseconds rounded to `DECIMALS`."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} must be a list of microseconds, one per pass, got {values!r}")
    rounded = []
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must hold numbers, got {value!r}")
        if not is_time(value):
            raise ValueError(f"{name} must hold microseconds above 0 and up to {MOST_US:g}, got {value}")
        rounded.append(round(float(value), DECIMALS))
    return tuple(rounded)


@dataclass(frozen=True)
class LaneFigures:
    """What was measured of a lane, with its fastest launch configuration.

    Args:
        us: microseconds of a verify per layer, one figure per independent pass; empty if ``why`` is given.
        round_us: of a round per layer (verify on every layer and one commit, over the layers); empty where the pool
            has no option that moves cost between the two.
        config: the configuration; None is the kernels' default.
        why: why the lane could not be measured.

    Figures are rounded to `DECIMALS` here, so that a table that was written and read back is the same table.

    Raises:
        TypeError, ValueError: a figure is no time, there are fewer than `LEAST_PASSES`, or figures and ``why`` exclude
            each other.
    """

    us: tuple[float, ...] = ()
    round_us: tuple[float, ...] = ()
    config: LaunchConfig | None = None
    why: str | None = None

    def __post_init__(self) -> None:
        for name in ("us", "round_us"):
            object.__setattr__(self, name, _figures(name, getattr(self, name)))
        if self.config is not None and not isinstance(self.config, LaunchConfig):
            raise TypeError(f"config must be a LaunchConfig or None, got {type(self.config).__name__}")
        if self.why is not None:
            one_line("why", self.why)
            if self.us or self.round_us or self.config is not None:
                raise ValueError("a lane has either why (it could not be measured) or figures, not both")
        elif not LEAST_PASSES <= len(self.us) <= MOST_PASSES:
            raise ValueError(
                f"us must have the figures of {LEAST_PASSES}..{MOST_PASSES} independent passes, got {len(self.us)} "
                "(a lane that could not be measured says why)"
            )
        if self.round_us and len(self.round_us) != len(self.us):
            raise ValueError(f"round_us must have as many passes as us ({len(self.us)}), got {len(self.round_us)}")


@dataclass(frozen=True)
class Closed:
    """Why a cell was set to unfused after it was measured: figures of a later history. A new measurement removes it.

    Args:
        history: where the figures are from.
        commits: the measured commits, oldest first; at least one.
        unfused_us, fused_us: microseconds of both lanes at each of them.
        date: ISO date on which the cell was closed.

    Raises:
        TypeError, ValueError: a text is none, or the figures are not one per commit.
    """

    history: str
    commits: tuple[str, ...]
    unfused_us: tuple[float, ...]
    fused_us: tuple[float, ...]
    date: str

    def __post_init__(self) -> None:
        one_line("closed.history", self.history)
        one_line("closed.date", self.date, 40)
        if not isinstance(self.commits, (list, tuple)) or not self.commits:
            raise ValueError(f"closed.commits must be a list of at least one commit, got {self.commits!r}")
        for commit in self.commits:
            one_line("closed.commits", commit, 80)
        object.__setattr__(self, "commits", tuple(self.commits))
        for name in ("unfused_us", "fused_us"):
            figures = _figures(f"closed.{name}", getattr(self, name))
            if len(figures) != len(self.commits):
                raise ValueError(f"closed.{name} must have a figure for each of the {len(self.commits)} commits")
            object.__setattr__(self, name, figures)


@dataclass(frozen=True)
class Cell:
    """Figures of every lane of a mode under one key, and the verdict.

    Args:
        key: what they were measured for.
        lane: the verdict that the table states.
        lanes: lane -> figures, both lanes of the mode, with equally many passes.
        closed: set where a later history overruled the figures; the verdict is then unfused.

    Raises:
        TypeError, ValueError: a lane is missing or of another mode, figures that decide are missing, or a configuration
            is one that verify refuses there.
    """

    key: CellKey
    lane: str
    lanes: Mapping[str, LaneFigures] = field(hash=False)
    closed: Closed | None = None

    def __post_init__(self) -> None:
        allowed = lanes_of(self.key.mode)
        one_of("lane", self.lane, allowed)
        if set(self.lanes) != set(allowed):
            raise ValueError(f"lanes must be {allowed} in mode {self.key.mode!r}, got {tuple(self.lanes)}")
        for lane, figures in self.lanes.items():
            config = figures.config
            if not self.decides_by_round and figures.round_us:
                raise ValueError(f"{lane} has round_us, which option 'plain' is not decided by")
            if self.decides_by_round and figures.why is None and not figures.round_us:
                raise ValueError(f"{lane} must have round_us: with option {self.key.option!r} a round decides")
            chunk = self.key.form == "chunked" and self.key.draft_tokens > MAX_GLUON_CHUNKED_TOKENS
            if config is not None and config.rows_per_thread is not None and chunk:
                raise ValueError(
                    f"{lane} has rows_per_thread={config.rows_per_thread}: that kernel takes up to "
                    f"T={MAX_GLUON_CHUNKED_TOKENS} in form 'chunked'"
                )
        counts = {len(figures.us) for figures in self.lanes.values() if figures.why is None}
        if len(counts) > 1:
            raise ValueError(f"both lanes must have the figures of the same passes, got {sorted(counts)} of them")

    @property
    def decides_by_round(self) -> bool:
        """Whether ``round_us`` decides, not ``us``."""
        return self.key.option != OPTIONS[0]

    def deciding(self, lane: str) -> tuple[float, ...]:
        """The figures of ``lane`` that the verdict goes by; empty if it could not be measured."""
        figures = self.lanes[lane]
        return figures.round_us if self.decides_by_round else figures.us

    def config(self, lane: str) -> LaunchConfig | None:
        """The launch configuration of ``lane``; None is the kernels' default."""
        return self.lanes[lane].config

    def ratio(self) -> float | None:
        """Fused over unfused time, of the pass that is worst for fused; None where a lane was not measured."""
        unfused, fused = (self.deciding(lane) for lane in lanes_of(self.key.mode))
        return max((f / u for u, f in zip(unfused, fused, strict=True)), default=None) if unfused and fused else None

    def supported(self, margin: float) -> str:
        """The lane that the figures support: fused where it wins by ``margin`` in *every* pass, else unfused.

        Fused wins a pass by the margin if its time is at most ``(1 - margin)`` of unfused's, and less than it.
        """
        unfused, fused = lanes_of(self.key.mode)
        pairs = list(zip(self.deciding(unfused), self.deciding(fused), strict=False))
        wins = [f < u and f <= (1 - margin) * u for u, f in pairs]
        if self.closed is not None or len(wins) < LEAST_PASSES or len(self.deciding(fused)) != len(wins):
            return unfused
        return fused if all(wins) else unfused

    def verdict(self, margin: float) -> str:
        """The lane to take: fused only where the table states it and the figures support it."""
        unfused, fused = lanes_of(self.key.mode)
        return fused if self.lane == fused == self.supported(margin) else unfused


def judged(key: CellKey, lanes: Mapping[str, LaneFigures], margin: float, closed: Closed | None = None) -> Cell:
    """The cell of these figures with the verdict that they support; see `Cell` for arguments and errors."""
    unfused, _ = lanes_of(key.mode)
    cell = Cell(key, unfused, dict(lanes), closed)
    return Cell(key, cell.supported(margin), cell.lanes, closed)


def config_fields(config: LaunchConfig) -> dict[str, Any]:
    """What a table states of a configuration: block_v, num_warps, and whatever is neither None nor False.

    ``pdl=False`` says something that None does not, and is stated too.
    """
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    return {name: v for name, v in values.items() if v is not None and (v is not False or name == "pdl")}
