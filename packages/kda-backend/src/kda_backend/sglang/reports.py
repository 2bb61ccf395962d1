"""What the plugin says in the log: that it is active, and each reason not to run a kernel of ours, once."""

from __future__ import annotations

import importlib.metadata
import logging

logger = logging.getLogger("kda_backend.sglang")

LIMIT = 256
"""Distinct reasons kept apart; later ones are not logged."""


class Reports:
    """Log lines of one process.

    SGLang loads plugins before it sets up logging, and what is logged at INFO until then is lost. So the line that says
    that the plugin is active waits for the first hook that runs, if INFO is not logged yet.
    """

    def __init__(self) -> None:
        self._pending: str | None = None
        self._seen: set[str] = set()
        self._warned = False
        self._informed = False

    def active(self, rule: str) -> None:
        """The hooks were registered; ``rule`` says what decides between fused and unfused verify."""
        self._pending = (
            f"kda-backend {_version('kda-backend')} plugged into SGLang {_version('sglang')}: KDA verify (chains) and "
            f"ReplaySSM commit; fused or unfused verify is decided by {rule}"
        )
        if logger.isEnabledFor(logging.INFO):
            self.hook_runs()

    def hook_runs(self) -> None:
        """A hook of ours was called."""
        if self._pending is not None:
            line, self._pending = self._pending, None
            logger.info("%s", line)

    def not_taken(self, reason: str) -> None:
        """Our kernels refused SGLang's arguments: the first of these in a process is a warning, others are DEBUG."""
        if self._is_new(reason):
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            logger.log(level, "SGLang's own kernel runs instead of ours: %s", reason)

    def not_chosen(self, reason: str) -> None:
        """The rule chose unfused verify: the first of these in a process is INFO, others are DEBUG."""
        if self._is_new(reason):
            level = logging.DEBUG if self._informed else logging.INFO
            self._informed = True
            logger.log(level, "unfused verify: %s (further reasons are logged at DEBUG)", reason)

    def _is_new(self, reason: str) -> bool:
        if reason in self._seen or len(self._seen) >= LIMIT:
            return False
        self._seen.add(reason)
        return True


reports = Reports()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
