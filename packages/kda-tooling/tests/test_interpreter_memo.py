"""The faster interpreter gives the same bits as Triton's own, in a process each."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, sys, torch
from kda_tooling.demo import interpreter_memo
applied = interpreter_memo.install() if sys.argv[1] == "memo" else False
from kda_tooling.demo.decoding import Decoder, ingest
from kda_tooling.demo.model import KdaLanguageModel, ModelConfig
torch.manual_seed(0)
torch.set_num_threads(1)
model = KdaLanguageModel(ModelConfig(num_layers=1, width=32, num_heads=1, mlp_width=32)).eval().requires_grad_(False)
requests = [ingest(model, b"abcabcab"), ingest(model, b"x = y")]
digest = hashlib.sha256()
for lane in ("unfused", "fused+ring"):
    run = Decoder(model, "cpu").decode(requests, lane=lane, draft_tokens=2, num_bytes=4)
    digest.update(b"".join(run.texts) + run.ssm_state.numpy().tobytes() + run.conv_state.float().numpy().tobytes())
print(applied, digest.hexdigest())
"""


def test_same_bits_with_and_without(device: str) -> None:
    if device != "cpu":
        pytest.skip("kernels are compiled here")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, mode], env=env, stdout=subprocess.PIPE, text=True)
        for mode in ("memo", "plain")
    ]
    (memo, memo_digest), (plain, plain_digest) = (process.communicate()[0].split() for process in processes)
    assert (memo, plain) == ("True", "False")
    assert memo_digest == plain_digest
