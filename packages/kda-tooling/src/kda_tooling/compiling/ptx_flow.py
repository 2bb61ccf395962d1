"""Which kernel arguments the compiled code reads and writes, and what it reads before the PDL wait: traced in PTX.

Every global load and store is followed back from its address register, through the arithmetic that built it, to the
pointer parameters it can come from. A value loaded from memory carries no parameter (an index read from ``slots``
does not make an address "come from" ``slots``). All definitions of a register count, so a loop or a branch can only
add parameters, never hide one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from kda_kernels.aot import CompiledVariant

UNTRACED = "?"
"""Stands for an address that leads back to no pointer argument."""

_STATEMENT = re.compile(r"(?P<guard>@!?%p\w+\s+)?(?P<opcode>[a-z][\w.]*)\s*(?P<operands>[^;]*)", re.S)
_REGISTER = re.compile(r"%[a-z]+\d+")
_BLOCK_LABEL = re.compile(r"\$L__BB\w+:")


@dataclass(frozen=True)
class Access:
    """One global memory instruction: the arguments its address can come from, and whether the wait came first."""

    opcode: str
    arguments: frozenset[str]
    after_wait: bool


@dataclass(frozen=True)
class MemoryFlow:
    """Global accesses of one kernel in program order.

    Args:
        loads: loads (and the reading half of atomics).
        stores: stores and atomics.
        waits: ``griddepcontrol.wait`` instructions.
        launches: ``griddepcontrol.launch_dependents`` instructions.
        wait_in_entry: the first wait runs unconditionally, before any branch or join.
    """

    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    waits: int
    launches: int
    wait_in_entry: bool

    @property
    def stored(self) -> set[str]:
        """Arguments that some store can write through."""
        return {name for access in self.stores for name in access.arguments}

    @property
    def early_loads(self) -> list[Access]:
        """Loads placed before the wait; all of them where there is no wait."""
        return [access for access in self.loads if not access.after_wait]


def _statements(ptx: str) -> list[str]:
    body = ptx[ptx.index(".entry") :]
    body = body[body.index("\n{") + 2 :]
    body = re.sub(r"//[^\n]*", "", body)
    pieces = re.split(r";|(?<=:)\n", body)
    return [piece.strip() for piece in pieces if piece.strip()]


def memory_flow(variant: CompiledVariant) -> MemoryFlow:
    """The global accesses of a kernel compiled for an NVIDIA device."""
    return trace_ptx(variant.asm["ptx"], variant.arguments)


def trace_ptx(ptx: str, arguments: dict[str, str]) -> MemoryFlow:
    """Like `memory_flow`, from PTX text and the kernel's run-time arguments (name -> Triton type) in order."""
    names = list(arguments)
    comes_from: dict[str, set[str]] = defaultdict(set)
    copies: list[tuple[list[str], list[str]]] = []
    accesses: list[tuple[str, list[str], bool]] = []
    waits = launches = 0
    branched = wait_in_entry = False
    for text in _statements(ptx):
        if _BLOCK_LABEL.search(text):
            branched = True
        found = _STATEMENT.match(re.sub(r"^(\s*\$\w+:\s*|\s*[{}]\s*|\s*\.loc[^\n]*\n\s*)+", "", text))
        if found is None:
            continue
        opcode, operands = found["opcode"], found["operands"]
        if opcode == "bra" or opcode.startswith("bra."):
            branched = True
        elif opcode == "griddepcontrol.wait":
            waits += 1
            if waits == 1:
                wait_in_entry = not branched and found["guard"] is None
        elif opcode == "griddepcontrol.launch_dependents":
            launches += 1
        elif opcode.startswith("ld.param"):
            parameter = re.search(r"_param_(\d+)", operands)
            index = int(parameter.group(1)) if parameter else len(names)
            if index < len(names) and arguments[names[index]].startswith("*"):
                for register in _REGISTER.findall(operands.split("[")[0]):
                    comes_from[register].add(names[index])
        elif _is_global_access(opcode):
            address = re.search(r"\[([^\]]*)\]", _address_operand(opcode, operands))
            accesses.append((opcode, _REGISTER.findall(address.group(1)) if address else [], waits > 0))
        elif not opcode.startswith(("ld.", "st.")):
            target, _, sources = _split_target(operands)
            copies.append((_REGISTER.findall(target), _REGISTER.findall(sources)))
    changed = True
    while changed:
        changed = False
        for targets, origins in copies:
            reached = set().union(*(comes_from[origin] for origin in origins)) if origins else set()
            for register in targets:
                if not reached <= comes_from[register]:
                    comes_from[register] |= reached
                    changed = True

    def access(opcode: str, registers: list[str], after_wait: bool) -> Access:
        reached = {name for register in registers for name in comes_from[register]}
        return Access(opcode, frozenset(reached or {UNTRACED}), after_wait)

    done = [access(*item) for item in accesses]
    return MemoryFlow(
        loads=tuple(a for a in done if a.opcode.startswith(("ld.", "atom.", "cp."))),
        stores=tuple(a for a in done if a.opcode.startswith(("st.", "atom.", "red."))),
        waits=waits,
        launches=launches,
        wait_in_entry=wait_in_entry,
    )


def _is_global_access(opcode: str) -> bool:
    if opcode.startswith("cp.async"):
        return ".global" in opcode
    if not opcode.startswith(("ld.", "st.", "atom.", "red.")):
        return False
    # A generic address may be global; only the named other spaces are not.
    return not any(space in opcode for space in (".shared", ".param", ".local", ".const"))


def _address_operand(opcode: str, operands: str) -> str:
    if opcode.startswith("cp.async"):  # cp.async [shared], [global], ...
        return operands[operands.index("]") + 1 :]
    return operands


def _split_target(operands: str) -> tuple[str, str, str]:
    """Destination (a register, ``a|b`` or ``{a, b}``) and the rest of the operand list."""
    if operands.lstrip().startswith("{"):
        return operands.partition("}")
    return operands.partition(",")
