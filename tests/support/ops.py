"""The verify ops and ring members that tests are parametrized over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kda_kernels import verify_fused, verify_reference, verify_unfused

Verify = Callable[..., torch.Tensor]

KERNELS = [pytest.param(verify_fused, id="fused"), pytest.param(verify_unfused, id="unfused")]
WITH_REFERENCE = [*KERNELS, pytest.param(verify_reference, id="reference")]

RING = ("raw_v", "raw_k", "g", "beta")
