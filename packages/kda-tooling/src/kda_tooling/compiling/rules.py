"""What compiled code must and must not do, checked on every configuration that is compiled.

* A kernel writes exactly the buffers its record asks for: ring-off code carries no ring stores, ring code no snapshot
  stores, and verify never writes conv_state, nor ssm_state unless it folds what is pending.
* With PDL, nothing but layer parameters is read before the wait on the preceding kernel, and slots and rows where they
  are declared ready; without it, there is no wait at all. ptxas may move code, so the machine code is held to the
  same number of early loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from kda_kernels.aot import CompiledVariant
from kda_tooling.compiling.ptx_flow import MemoryFlow, memory_flow
from kda_tooling.compiling.stats import sass_of, sass_opcodes

RING_BUFFERS = frozenset({"raw_v", "raw_k", "ring_g", "ring_beta"})
SNAPSHOT_BUFFERS = frozenset({"snapshots"})
LAYER_PARAMETERS = frozenset({"conv_weight", "conv_bias", "A_log", "dt_bias"})
INDICES = frozenset({"slots", "rows"})
"""May be read early by a kernel with ``INDICES_READY``: its caller, or the conv kernel before it, vouches for them."""

COUNTERS = frozenset({"errors"})
"""Written by every kernel that was given an error tensor."""

_RECORD_BUFFERS = {"ring": RING_BUFFERS, "snapshots": SNAPSHOT_BUFFERS}


FOLDED_BUFFERS = frozenset({"ssm_state", "folded"})
"""Written where records are replayed once: by a flush, and by a verify of fold on verify."""


def expected_stores(label: str, record: str, pending: bool = False, compact: bool = False) -> frozenset[str]:
    """Arguments that the kernel called ``label`` writes, error counters aside.

    ``pending``: verify that folds; ``compact``: verify that notes its inputs in place of writing windows.
    """
    window = "kept_inputs" if compact else "window"
    if label in ("fused", "recurrence"):
        windows = frozenset({window}) if label == "fused" else frozenset()
        folded = FOLDED_BUFFERS if pending else frozenset()
        return frozenset({"out"}) | windows | _RECORD_BUFFERS[record] | folded
    return {
        "conv": frozenset({"y", window}),
        "fold": frozenset({"ssm_state"}),
        "scatter_conv": frozenset({"dst"}),
        "scatter_snapshots": frozenset({"dst"}),
        "gather_conv": frozenset({"conv_state"}),
        "advance": frozenset({"parity", "pending", "epoch"}),
        "flush": FOLDED_BUFFERS,
    }[label]


@dataclass(frozen=True)
class Inspection:
    """What the PTX of a kernel says.

    Args:
        stores: arguments that some store or atomic can write through.
        early_loads: arguments read before the PDL wait; everything that is read, where there is no wait.
        waits: ``griddepcontrol.wait`` instructions.
        broken: rules that the code breaks, a sentence each.
    """

    stores: tuple[str, ...]
    early_loads: tuple[str, ...]
    waits: int
    broken: tuple[str, ...]


def inspect(
    variant: CompiledVariant, label: str, record: str, pending: bool = False, compact: bool = False
) -> Inspection | None:
    """Look into one compiled kernel; None for a target without PTX."""
    if "ptx" not in variant.asm:
        return None
    flow = memory_flow(variant)
    pdl = bool(variant.options.get("launch_pdl", False))
    ready = INDICES if variant.constexprs.get("INDICES_READY") else frozenset[str]()
    broken = broken_rules(flow, expected_stores(label, record, pending, compact), pdl=pdl, ready=ready)
    if pdl and flow.waits:
        broken += _moved_loads(sass_opcodes(sass_of(variant)), flow)
    early = {name for access in flow.early_loads for name in access.arguments}
    return Inspection(tuple(sorted(flow.stored)), tuple(sorted(early)), flow.waits, tuple(broken))


def broken_rules(
    flow: MemoryFlow, wanted: frozenset[str], *, pdl: bool, ready: frozenset[str] = frozenset()
) -> list[str]:
    """A sentence for each rule broken by a kernel that must write ``wanted`` and is launched with or without PDL.

    ``ready``: arguments besides layer parameters that it may read before the wait.
    """
    broken = []
    stored = flow.stored - COUNTERS
    if stored - wanted:
        broken.append(f"stores through {', '.join(sorted(stored - wanted))}, which it must not write")
    if wanted - stored:
        broken.append(f"never stores to {', '.join(sorted(wanted - stored))}, which it must write")
    return broken + (_broken_pdl_rules(flow, ready) if pdl else _no_pdl_rules(flow))


def _no_pdl_rules(flow: MemoryFlow) -> list[str]:
    return ["has griddepcontrol instructions although PDL is off"] if flow.waits or flow.launches else []


def _broken_pdl_rules(flow: MemoryFlow, ready: frozenset[str]) -> list[str]:
    if not flow.waits:
        return ["is launched with PDL but never waits for the preceding kernel"]
    broken = []
    if not flow.wait_in_entry:
        broken.append("waits for the preceding kernel only after a branch")
    early = {name for access in flow.early_loads for name in access.arguments} - LAYER_PARAMETERS - ready
    if early:
        broken.append(f"reads {', '.join(sorted(early))} before waiting for the preceding kernel")
    if any(not access.after_wait for access in flow.stores):
        broken.append("stores before waiting for the preceding kernel")
    return broken


def _moved_loads(opcodes: list[str], flow: MemoryFlow) -> list[str]:
    machine_loads = sum(1 for op in opcodes[: opcodes.index("ACQBULK")] if op.startswith("LDG"))
    if machine_loads <= len(flow.early_loads):
        return []
    return [
        f"has {machine_loads} loads before the wait in machine code, {len(flow.early_loads)} in PTX: "
        "ptxas moved some up"
    ]
