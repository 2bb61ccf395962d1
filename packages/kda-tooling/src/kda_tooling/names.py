"""Names of the activation dtypes, short where something is timed or compiled, torch's in gate tables, and of tables.

No torch here, so that ``--help`` need not import it.
"""

from __future__ import annotations

import re

TABLE_NAME = re.compile(r"H=(\d+),HV=(\d+),K=(\d+),V=(\d+),device_name=.+,dtype=(\w+)\.json")
"""A gate table's file: H, HV, K, V and the long name of the dtype; see `kda_backend.gate.table_name`."""

LONG_NAMES = {"bf16": "bfloat16", "fp16": "float16"}


def long_dtype(name: str) -> str:
    """bfloat16 or float16 for bf16 or fp16; anything else as it is."""
    return LONG_NAMES.get(name, name)


def short_dtype(name: str) -> str:
    """bf16 or fp16 for bfloat16 or float16; anything else as it is."""
    return {long: short for short, long in LONG_NAMES.items()}.get(name, name)
