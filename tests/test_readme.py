"""The README's code runs as it stands, with sizes small enough for the interpreter; it names every command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import typer

from kda_kernels import KdaShape, LayerParams
from kda_tooling.cli import app

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.+?)^```", README, flags=re.MULTILINE | re.DOTALL)

# the README's sizes -> ours; T = 4 stays
SMALLER = {
    "num_heads=8, num_v_heads=8": "num_heads=1, num_v_heads=1",
    "=128": "=64",
    "num_layers=24": "num_layers=2",
    "max_batch=64": "max_batch=2",
    "rows=64": "rows=2",
    "=256": "=3",
}
SHAPE, BATCH, STEPS = KdaShape(num_heads=1, num_v_heads=1, head_k_dim=64, head_v_dim=64), 2, 4


def test_examples_run(device: str) -> None:
    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*size, dtype=dtype, device=device)

    tokens, gates = BATCH * STEPS, SHAPE.num_v_heads * SHAPE.head_k_dim
    params = LayerParams(
        conv_weight=normal(SHAPE.conv_dim, 4),
        conv_bias=None,
        A_log=normal(SHAPE.num_v_heads, dtype=torch.float32),
        dt_bias=normal(gates, dtype=torch.float32),
    )
    names: dict[str, Any] = {
        "slots": torch.tensor([2, -1], device=device),
        "conv_state": normal(2, 3, SHAPE.conv_dim),
        "ssm_state": normal(2, SHAPE.num_v_heads, SHAPE.head_v_dim, SHAPE.head_k_dim, dtype=torch.float32),
        "accept_lens": torch.tensor([3, 0], device=device),
        "layers": [params, params],
        "params": params,
        "mixed_qkv": normal(tokens, SHAPE.conv_dim),
        "a": normal(tokens, gates),
        "b": normal(tokens, SHAPE.num_v_heads),
    }
    assert len(EXAMPLES) == 2
    for example in EXAMPLES:
        for size, smaller in SMALLER.items():
            example = example.replace(size, smaller)
        exec(compile(example.replace('device="cuda"', f'device="{device}"'), "README.md", "exec"), names)
        assert names["out"].shape == (tokens, SHAPE.num_v_heads, SHAPE.head_v_dim)


def test_every_subcommand_is_named() -> None:
    command = typer.main.get_command(app)
    subcommands = set(command.commands)  # type: ignore[attr-defined]
    assert len(subcommands) > 5
    named = set(re.findall(r"^\| `kda ([\w-]+)` \|", README, flags=re.MULTILINE))
    assert named == subcommands
    changelog = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    assert subcommands <= set(re.findall(r"`kda ([\w-]+)`", changelog))
