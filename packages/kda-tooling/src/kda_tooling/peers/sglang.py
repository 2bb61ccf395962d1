"""SGLang's KDA verify and commit kernels, loaded from an unpacked wheel or an installed package without its engine.

Six kernel files are executed under their own module names. What they import from the engine is replaced by small
stand-ins that answer the same questions (which device, is PDL supported).
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kda_kernels import CONV_WIDTH, Ring
from kda_tooling.problem import VerifyProblem

FILES = (
    "memory/ptr_table",
    "mamba/causal_conv1d_triton",
    "mamba/mamba_state_scatter_triton",
    "attention/linear/fused_sigmoid_gating_recurrent",
    "attention/linear/fused_kda_conv_recurrent_verify",
    "attention/linear/kda_replayssm_spec_decode",
)
"""Kernel files below ``sglang/kernels/ops``, in an order that satisfies their imports of each other."""

FUSED_BLOCK_V = (4, 8, 16, 32, 64)
"""V tiles that the fused kernel is measured with; its own is 4.

128 has not been measured: at K = 128 its state tile alone takes 128 registers of every thread of the kernel's 4 warps.
"""


def _capability() -> int:
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def _stand_ins() -> dict[str, dict[str, Callable[..., Any]]]:
    """Module name -> the functions that the kernel files import from it."""
    hip = torch.version.hip is not None
    sm = 0 if hip else _capability()
    return {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: sm >= 90, "is_hip_runtime": lambda: hip},
        "sglang.srt.utils": {
            "get_device_sm": lambda: sm,
            "is_cuda": lambda: not hip and torch.cuda.is_available(),
            "is_gfx95_supported": lambda: False,
            "is_hip": lambda: hip,
            "is_sm90_supported": lambda: sm == 90,
        },
        "sglang.srt.utils.common": {
            "get_device_core_count": lambda index=0: torch.cuda.get_device_properties(index).multi_processor_count
        },
    }


def _package(name: str) -> types.ModuleType:
    """The module ``name`` in sys.modules, made as an empty package, with its parents, where it is missing."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(_package(parent), child, module)
    return sys.modules[name]


def _find_root(path: Path) -> Path:
    path = path.resolve()
    for root in (path, path.parent):
        if (root / "sglang" / "kernels").is_dir():
            return root
    raise FileNotFoundError(
        f"{path} holds no sglang/kernels folder: unpack a wheel there (pip download --no-deps sglang; unzip), "
        "or give the site-packages folder of an installed one"
    )


def _version(root: Path) -> str:
    for metadata in sorted(root.glob("sglang-*.dist-info/METADATA")):
        for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    version = root / "VERSION"
    return version.read_text().strip() if version.is_file() else "unknown"


def load_sglang(path: Path) -> SglangPeer:
    """Load SGLang's kernels from ``path``: a folder that holds ``sglang/``, or that folder itself.

    Raises:
        FileNotFoundError: a kernel file is missing; the message names it.
        RuntimeError: another copy is loaded in this process already.
    """
    root = _find_root(path)
    files = {name: root / "sglang" / "kernels" / "ops" / f"{name}.py" for name in FILES}
    missing = [str(f) for f in files.values() if not f.is_file()]
    if missing:
        raise FileNotFoundError(f"this SGLang lacks kernel files that the comparison needs: {', '.join(missing)}")
    modules: dict[str, types.ModuleType] = {}
    for name, functions in _stand_ins().items():
        _package(name).__dict__.update(functions)
    for name, file in files.items():
        module_name = "sglang.kernels.ops." + name.replace("/", ".")
        loaded = sys.modules.get(module_name)
        if loaded is not None:
            if Path(str(loaded.__file__)) != file:
                raise RuntimeError(f"SGLang is loaded from {loaded.__file__} already, cannot load {file} as well")
            modules[name] = loaded
            continue
        parent, _, child = module_name.rpartition(".")
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise FileNotFoundError(f"cannot load {file}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        setattr(_package(parent), child, module)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        modules[name] = module
    return SglangPeer(modules, _version(root))


class SglangPeer:
    """SGLang's lanes as functions of a `VerifyProblem`, called as its KDA backend calls them."""

    name = "sglang"

    def __init__(self, modules: dict[str, types.ModuleType], version: str) -> None:
        self.version = version
        self._conv = modules["mamba/causal_conv1d_triton"]
        self._scatter = modules["mamba/mamba_state_scatter_triton"]
        self._recurrent = modules["attention/linear/fused_sigmoid_gating_recurrent"]
        self._fused = modules["attention/linear/fused_kda_conv_recurrent_verify"]
        self._commit = modules["attention/linear/kda_replayssm_spec_decode"]
        self._rows: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._starts_of: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    def verify_arms(self, problem: VerifyProblem) -> dict[str, Callable[[VerifyProblem], torch.Tensor]]:
        """The unfused+ring lane and the fused+ring lane at every V tile, where their kernels take the problem."""
        arms: dict[str, Callable[[VerifyProblem], torch.Tensor]] = {"unfused+ring": self.verify_unfused}
        if not self.not_taken(problem):
            for block_v in FUSED_BLOCK_V:
                if block_v <= problem.shape.head_v_dim:
                    arms[f"fused+ring bv{block_v}"] = partial(self.verify_fused, block_v=block_v)
        return arms

    def not_taken(self, problem: VerifyProblem) -> dict[str, str]:
        """Arm name -> why: the fused kernel asserts T >= conv width - 1."""
        if problem.draft_tokens >= CONV_WIDTH - 1:
            return {}
        return {"fused+ring": f"its fused kernel takes at least {CONV_WIDTH - 1} draft tokens"}

    def verify_unfused(self, p: VerifyProblem, snapshots: bool = False) -> torch.Tensor:
        """conv update, then recurrence, with the two transposes in between that the engine does. [B*T, HV, V].

        Rolls ``state.conv_state`` in place: that is what this lane does. ``snapshots`` records states, not the ring.
        """
        shape, t, tokens = p.shape, p.draft_tokens, p.mixed_qkv.shape[0]
        rows = self._batch_rows(p)
        y = self._conv.causal_conv1d_update(
            p.mixed_qkv.view(p.batch, t, -1).transpose(1, 2),
            p.state.conv_state.transpose(-1, -2),
            p.params.conv_weight,
            p.params.conv_bias,
            activation="silu",
            conv_state_indices=p.slots,
            intermediate_conv_window=p.state.windows.transpose(-1, -2),
            intermediate_state_indices=rows,
        )
        y = y.transpose(1, 2).reshape(tokens, -1)
        qk = shape.num_heads * shape.head_k_dim
        q, k, v = y.split([qk, qk, shape.num_v_heads * shape.head_v_dim], dim=1)
        heads = (1, tokens, shape.num_heads, shape.head_k_dim)
        out = self._recurrent.fused_sigmoid_gating_delta_rule_update(
            A_log=p.params.A_log, a=p.a, dt_bias=p.params.dt_bias, softplus_beta=1.0, softplus_threshold=20.0,
            q=q.view(heads), k=k.view(heads), v=v.view(1, tokens, shape.num_v_heads, shape.head_v_dim), b=p.b,
            initial_state_source=p.state.ssm_state, initial_state_indices=p.slots,
            use_qk_l2norm_in_kernel=True, cu_seqlens=self._starts(p), is_kda=True, lower_bound=p.params.lower_bound,
            disable_state_update=True, cache_steps=t, intermediate_state_indices=rows,
            intermediate_states_buffer=p.record("snapshots").states if snapshots else None,
            **({} if snapshots else _ring_keywords(p)),
        )  # fmt: skip
        return out.view(tokens, shape.num_v_heads, shape.head_v_dim)

    def verify_fused(self, p: VerifyProblem, block_v: int) -> torch.Tensor:
        """The fused kernel with its V tile set to ``block_v``. [B*T, HV, V]."""
        shape = p.shape
        fused: Any = self._fused  # a module whose names mypy cannot know
        before = fused.KDA_VERIFY_BLOCK_V
        fused.KDA_VERIFY_BLOCK_V = block_v
        try:
            out = fused.fused_kda_conv_gating_verify(
                mixed_qkv=p.mixed_qkv, conv_weight=p.params.conv_weight, conv_bias=p.params.conv_bias,
                conv_state=p.state.conv_state.transpose(-1, -2), conv_state_indices=p.slots,
                intermediate_conv_window=p.state.windows.transpose(-1, -2),
                intermediate_state_indices=self._batch_rows(p),
                a=p.a, b=p.b, A_log=p.params.A_log, dt_bias=p.params.dt_bias, ssm_states=p.state.ssm_state,
                cache_indices=p.slots, intermediate_states_buffer=None, scale=p.params.scale_for(shape),
                T=p.draft_tokens, num_q_heads=shape.num_heads, num_v_heads=shape.num_v_heads,
                head_k_dim=shape.head_k_dim, head_v_dim=shape.head_v_dim, lower_bound=p.params.lower_bound,
                **_ring_keywords(p),
            )  # fmt: skip
        finally:
            fused.KDA_VERIFY_BLOCK_V = before
        return out.view(-1, shape.num_v_heads, shape.head_v_dim)

    def commit(
        self, ssm_state: torch.Tensor, ring: Ring, conv_state: torch.Tensor, conv_window: torch.Tensor,
        slots: torch.Tensor, accept_lens: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fold and conv-window scatter of all layers, in place; slot 0 is an ordinary slot here."""
        self._commit.commit_kda_replayssm_spec_all_layers(
            ssm_state, ring.raw_v, ring.raw_k, ring.g, ring.beta, slots, accept_lens,
            max_cache_len=ring.length, num_k_heads=ring.raw_k.shape[2], null_block_id=-1,
        )  # fmt: skip
        self._scatter.fused_conv_window_scatter_with_mask(conv_state, conv_window, slots, accept_lens - 1)

    def _batch_rows(self, p: VerifyProblem) -> torch.Tensor:
        """0..B-1 int32, cached: the engine keeps such a tensor too."""
        key = (p.batch, p.slots.device)
        if key not in self._rows:
            self._rows[key] = torch.arange(p.batch, dtype=torch.int32, device=p.slots.device)
        return self._rows[key]

    def _starts(self, p: VerifyProblem) -> torch.Tensor:
        """Token offsets of the requests, [B+1] int32, cached."""
        key = (p.batch, p.draft_tokens, p.slots.device)
        if key not in self._starts_of:
            starts = torch.arange(p.batch + 1, dtype=torch.int32, device=p.slots.device) * p.draft_tokens
            self._starts_of[key] = starts
        return self._starts_of[key]


def _ring_keywords(p: VerifyProblem) -> dict[str, Any]:
    ring = p.record("ring")
    return {
        "cache_ring": True, "replayssm_rawv": ring.raw_v, "replayssm_rawk": ring.raw_k,
        "replayssm_g": ring.g, "replayssm_beta": ring.beta,
    }  # fmt: skip
