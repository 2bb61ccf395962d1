"""What the compiler makes of every kernel and configuration, for seven GPU targets: a history that needs no GPU."""

from __future__ import annotations

import math

from . import Values, compiled
from .source import TIMEOUT, values_of

TARGETS = compiled()


class CompileSuite:
    """Base of both suites: everything is compiled once."""

    version = "1"

    def setup_cache(self) -> Values:
        """("target kernel configuration", figure) and (target, "variants") -> figure."""
        return values_of("compile")

    setup_cache.timeout = TIMEOUT  # type: ignore[attr-defined]


class CompiledKernel(CompileSuite):
    """A figure of the machine code of each kernel in each configuration; none has noise."""

    params = ([f"{target} {name}" for target, names in TARGETS.items() for name in names],)
    param_names = ("kernel",)

    def track_registers(self, cells: Values, kernel: str) -> float:
        """Registers per thread."""
        return cells.get((kernel, "registers"), math.nan)

    track_registers.unit = "registers"  # type: ignore[attr-defined]

    def track_spills(self, cells: Values, kernel: str) -> float:
        """Bytes of stack or scratch per thread."""
        return cells.get((kernel, "spills"), math.nan)

    track_spills.unit = "bytes"  # type: ignore[attr-defined]

    def track_shared(self, cells: Values, kernel: str) -> float:
        """Bytes of shared memory per block."""
        return cells.get((kernel, "shared"), math.nan)

    track_shared.unit = "bytes"  # type: ignore[attr-defined]

    def track_shuffles(self, cells: Values, kernel: str) -> float:
        """Instructions that move a register between lanes."""
        return cells.get((kernel, "shuffles"), math.nan)

    track_shuffles.unit = "instructions"  # type: ignore[attr-defined]

    def track_instructions(self, cells: Values, kernel: str) -> float:
        """Machine instructions."""
        return cells.get((kernel, "instructions"), math.nan)

    track_instructions.unit = "instructions"  # type: ignore[attr-defined]


class Variants(CompileSuite):
    """Compiled kernels per target: what a first start has to compile."""

    params = (list(TARGETS),)
    param_names = ("target",)
    unit = "kernels"

    def track_compiled(self, cells: Values, target: str) -> float:
        """The number, NaN where not everything was compiled."""
        return cells.get((target, "variants"), math.nan)
