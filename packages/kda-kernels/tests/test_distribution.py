"""What the installed distribution promises: version, typing marker, every public name, an import without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.resources import files

import kda_kernels


def test_version_is_the_distribution_s() -> None:
    assert kda_kernels.__version__ == importlib.metadata.version("kda-kernels")


def test_typed_and_public_names_exist() -> None:
    assert (files("kda_kernels") / "py.typed").is_file()
    for name in kda_kernels.__all__:
        assert getattr(kda_kernels, name).__doc__ or name.isupper(), f"{name} has no docstring"


def test_import_needs_neither_gpu_nor_interpreter() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import kda_kernels, torch; assert not torch.cuda.is_available(); print(kda_kernels.KdaShape(1, 2, 64, 64))"
    subprocess.run([sys.executable, "-c", code], env=env | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
