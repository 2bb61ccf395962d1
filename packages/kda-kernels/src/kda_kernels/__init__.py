"""Kernels that verify speculative drafts on Kimi Delta Attention layers, fused or unfused, with snapshots or a ring.

Importing this package needs no GPU. With ``TRITON_INTERPRET=1`` set before the import, kernels run on CPU tensors.
"""

from kda_kernels import interpreter
from kda_kernels.buffers import LayerParams, LayerState, PendingFold, Ring, Snapshots
from kda_kernels.checking import host_checks
from kda_kernels.checks import verify_reason
from kda_kernels.commit import fold, scatter_conv, scatter_snapshots
from kda_kernels.commit_checks import fold_reason, scatter_reason
from kda_kernels.errors import ErrorKind, describe_errors, new_error_counts
from kda_kernels.flush_checks import advance_reason, flush_reason
from kda_kernels.gather import gather_conv
from kda_kernels.gather_checks import gather_reason
from kda_kernels.pending import advance, flush
from kda_kernels.reference import (
    fold_reference,
    reference_precision,
    scatter_conv_reference,
    scatter_snapshots_reference,
    verify_reference,
)
from kda_kernels.reference_gather import gather_conv_reference
from kda_kernels.reference_pending import advance_reference, flush_reference
from kda_kernels.shapes import CONV_WIDTH, FORMS, MAX_CHUNKED_TOKENS, KdaShape, LaunchConfig
from kda_kernels.verify import verify_fused, verify_unfused

__version__ = "0.1.0"

__all__ = [
    "CONV_WIDTH",
    "FORMS",
    "MAX_CHUNKED_TOKENS",
    "ErrorKind",
    "KdaShape",
    "LaunchConfig",
    "LayerParams",
    "LayerState",
    "PendingFold",
    "Ring",
    "Snapshots",
    "advance",
    "advance_reason",
    "advance_reference",
    "describe_errors",
    "flush",
    "flush_reason",
    "flush_reference",
    "fold",
    "fold_reason",
    "fold_reference",
    "gather_conv",
    "gather_conv_reference",
    "gather_reason",
    "host_checks",
    "new_error_counts",
    "reference_precision",
    "scatter_conv",
    "scatter_conv_reference",
    "scatter_reason",
    "scatter_snapshots",
    "scatter_snapshots_reference",
    "verify_fused",
    "verify_reason",
    "verify_reference",
    "verify_unfused",
]

interpreter.install()
