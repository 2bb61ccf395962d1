"""What the installed distribution promises: version, typing marker, every public name, an import without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.resources import files

import kda_backend


def test_version_is_the_distribution_s() -> None:
    assert kda_backend.__version__ == importlib.metadata.version("kda-backend")


def test_typed_and_public_names_exist() -> None:
    assert (files("kda_backend") / "py.typed").is_file()
    for name in kda_backend.__all__:
        assert hasattr(kda_backend, name)


def test_import_needs_neither_gpu_nor_interpreter() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "import kda_backend, torch; assert not torch.cuda.is_available(); print(kda_backend.LANES)"
    subprocess.run([sys.executable, "-c", code], env=env | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
