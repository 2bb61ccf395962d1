"""Figures of compiled kernels: registers, spills, shared memory, shuffles, instructions, read from the machine code."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import triton

from kda_kernels.aot import CompiledVariant


@dataclass(frozen=True)
class CodeStats:
    """Figures of one compiled kernel.

    Args:
        registers: per thread (NVIDIA), or vector registers per lane, accumulators included (AMD).
        spills: bytes of stack per thread (NVIDIA) or of scratch per lane (AMD).
        shared: bytes of shared memory (LDS) that the launch asks for. The 1 KiB per block that CUDA keeps for itself
            from sm90 on is not in it.
        shuffles: instructions that move a register between lanes (SHFL; ds_swizzle, ds_permute, DPP, v_permlane).
        instructions: machine instructions, without padding.
        barriers: block-wide barriers.
        global_loads: load instructions from global memory.
        global_stores: store and atomic instructions to global memory.
    """

    registers: int
    spills: int
    shared: int
    shuffles: int
    instructions: int
    barriers: int
    global_loads: int
    global_stores: int

    def to_dict(self) -> dict[str, int]:
        """The figures by name."""
        return asdict(self)


def code_stats(variant: CompiledVariant) -> CodeStats:
    """The figures of one compiled kernel. Raises RuntimeError when the machine code is not of the expected form."""
    if "cubin" in variant.asm:
        return _nvidia_stats(variant)
    if "amdgcn" in variant.asm:
        return amd_stats(variant.asm["amdgcn"], variant.shared)
    raise RuntimeError(f"{variant.kernel} for {variant.target}: no machine code among {', '.join(variant.asm)}")


def sass_of(variant: CompiledVariant) -> str:
    """The disassembly of a kernel compiled for an NVIDIA device."""
    return _cuobjdump("-sass", variant.asm["cubin"])


@functools.lru_cache(maxsize=4)
def _cuobjdump(flag: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, flag, str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{tool} {flag} failed: {done.stderr.strip()}")
    return done.stdout


def registers_and_spills(variant: CompiledVariant) -> tuple[int, int]:
    """`CodeStats`'s two figures of a kernel for an NVIDIA device, without the time that disassembling takes."""
    usage = _cuobjdump("-res-usage", variant.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage said nothing that can be read about {variant.kernel}:\n{usage}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _nvidia_stats(variant: CompiledVariant) -> CodeStats:
    return _count_sass(sass_of(variant), *registers_and_spills(variant), variant.shared)


def sass_opcodes(sass: str) -> list[str]:
    """Opcodes with their modifiers (``LDG.E.128``), in address order, without the padding after the last branch."""
    found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)", sass, re.M)
    return [op for op in found if op != "NOP"]


def _count_sass(sass: str, registers: int, spills: int, shared: int) -> CodeStats:
    opcodes = sass_opcodes(sass)
    kinds = Counter(op.split(".")[0] for op in opcodes)
    return CodeStats(
        registers=registers,
        spills=spills,
        shared=shared,
        shuffles=kinds["SHFL"],
        instructions=len(opcodes),
        barriers=kinds["BAR"],
        global_loads=kinds["LDG"] + kinds["LDGSTS"],
        global_stores=kinds["STG"] + kinds["RED"] + kinds["REDG"] + kinds["ATOM"] + kinds["ATOMG"],
    )


_AMD_LANE_MOVES = re.compile(r"ds_(bpermute|permute|swizzle)|v_permlane|_dpp")


def amd_stats(amdgcn: str, shared: int) -> CodeStats:
    """Figures from the assembly text (and the metadata at its end) of a kernel for an AMD device."""
    body = amdgcn[: amdgcn.index(".Lfunc_end0")]
    opcodes = re.findall(r"^\t((?:s|v|ds|buffer|global|flat|scratch)_\w+)", body, re.M)
    opcodes = [op for op in opcodes if op not in ("s_nop", "s_code_end")]

    def metadata(name: str) -> int:
        found = re.search(rf"^\s*-?\s*\.{name}:\s*(\d+)", amdgcn, re.M)
        if found is None:
            raise RuntimeError(f"no .{name} in the metadata of the assembly")
        return int(found.group(1))

    def count(pattern: str) -> int:
        return sum(1 for op in opcodes if re.match(pattern, op))

    return CodeStats(
        registers=metadata("vgpr_count"),
        spills=max(metadata("private_segment_fixed_size"), 4 * metadata("vgpr_spill_count")),
        shared=max(shared, metadata("group_segment_fixed_size")),
        shuffles=sum(1 for op in opcodes if _AMD_LANE_MOVES.search(op)),
        instructions=len(opcodes),
        barriers=count("s_barrier"),
        global_loads=count("(buffer|global|flat)_load"),
        global_stores=count("(buffer|global|flat)_(store|atomic)"),
    )
