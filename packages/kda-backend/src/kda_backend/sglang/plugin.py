"""What SGLang calls at start: checks that its functions are the ones we know, then registers our replacements."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_backend.sglang.commit import commit_kda_replayssm_after_verify
from kda_backend.sglang.gate import can_run_fused_chain_verify
from kda_backend.sglang.reports import logger, reports
from kda_backend.sglang.rule import describe_rule
from kda_backend.sglang.signatures import declared_signature, difference
from kda_backend.sglang.switches import switched_on
from kda_backend.sglang.verify import fused_kda_conv_gating_verify

SWITCH = "KDA_SGLANG_PLUGIN"
"""Environment variable: a word of `switches.OFF` leaves SGLang as it is, and so does one that is not known."""


@dataclass(frozen=True)
class Target:
    """A function of SGLang and what takes its place.

    Args:
        module: dotted name of the module that defines it.
        name: its name in the module, with the class where it is a method.
        hook: the replacement, with the same parameters and defaults.
    """

    module: str
    name: str
    hook: Callable[..., Any]

    @property
    def path(self) -> str:
        """The dotted path that HookRegistry takes."""
        return f"{self.module}.{self.name}"

    def source(self, root: Path) -> Path:
        """The file that defines it, ``root`` being the ``sglang`` folder."""
        return root.joinpath(*self.module.split(".")[1:]).with_suffix(".py")


TARGETS = (
    Target(
        "sglang.kernels.ops.attention.linear.fused_kda_conv_recurrent_verify",
        "fused_kda_conv_gating_verify",
        fused_kda_conv_gating_verify,
    ),
    Target(
        "sglang.srt.layers.attention.linear.kda_backend",
        "KDAAttnBackend._can_run_fused_chain_verify",
        can_run_fused_chain_verify,
    ),
    Target(
        "sglang.kernels.ops.attention.linear.kda_replayssm_spec_decode",
        "commit_kda_replayssm_after_verify",
        commit_kda_replayssm_after_verify,
    ),
)


def register() -> None:
    """Register the three replacements with SGLang's HookRegistry, or say in the log why not.

    Never raises: whatever goes wrong, the server runs on with SGLang's own functions. All three are registered or
    none. SGLang's modules are not imported here but by SGLang, when it applies the hooks; their source files are read.
    """
    try:
        if not switched_on(SWITCH):
            logger.info("kda-backend's SGLang plugin is switched off by %s", SWITCH)
            return
    except ValueError as unknown:  # meant to change something: what was there before is the safe reading
        logger.warning("kda-backend's SGLang plugin stays off: %s", unknown)
        return
    try:
        root = Path(next(iter(importlib.import_module("sglang").__path__)))
        if problem := drift(root):
            logger.warning("kda-backend does not plug into this SGLang, which is not the one it knows: %s", problem)
            return
        registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
        for target in TARGETS:
            registry.HookRegistry.register(target.path, target.hook, registry.HookType.REPLACE)
        reports.active(describe_rule())
    except Exception:  # a plugin must not take the server down
        logger.exception("kda-backend could not plug into SGLang, which goes on without it")


def drift(root: Path) -> str | None:
    """How SGLang's functions, as its source files under ``root`` declare them, differ from ours; None if not at all."""
    for target in TARGETS:
        source = target.source(root)
        if not source.is_file():
            return f"{source} is missing, so the parameters of {target.path} cannot be compared"
        declared = declared_signature(source, target.name)
        if declared is None:
            return f"{source} defines no {target.name}"
        if found := difference(declared, target.hook):
            return f"{target.path}: {found}"
    return None
