"""Every task of this repository, one session each: `python3 -m nox --list` shows them.

One real environment, `.nox/dev`, is shared by all sessions that work on the source tree. The sessions that prove what
a user installs (`test_kernels`, `test_backend`, `test_tooling`, `lowest`) get a fresh one with built wheels instead.
Whatever follows `--` reaches the session's main command. `nox -R -s tests` skips the installation step.
"""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
# virtualenv with pip, never uv: uv would take the CUDA build of torch on a machine without a GPU.
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = ["lint", "typecheck", "tests"]

ROOT = Path(__file__).parent
CONSTRAINTS = ROOT / "constraints.txt"
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
KERNELS, BACKEND, TOOLING = (ROOT / "packages" / name for name in ("kda-kernels", "kda-backend", "kda-tooling"))

# The oldest versions that kda-kernels declares, beside the pinned torch (torch 2.11 is covered by the gpu suite).
LOWEST = {"triton": "3.6.0", "numpy": "2.3.0"}

# SGLang, whose kernels ours are compared with and whose functions the plugin replaces. Its wheel is not installed: the
# tests need these few of its files, and none of its dependencies.
SGLANG_VERSION = "0.5.23"
SGLANG_FILES = (
    f"sglang-{SGLANG_VERSION}.dist-info/METADATA",
    "sglang/kernels/ops/memory/ptr_table.py",
    "sglang/kernels/ops/mamba/causal_conv1d_triton.py",
    "sglang/kernels/ops/mamba/mamba_state_scatter_triton.py",
    "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
    "sglang/kernels/ops/attention/linear/fused_kda_conv_recurrent_verify.py",
    "sglang/kernels/ops/attention/linear/kda_replayssm_spec_decode.py",
    "sglang/srt/plugins/hook_registry.py",
    "sglang/srt/layers/attention/linear/kda_backend.py",
)
SGLANG_TESTS = (
    "packages/kda-backend/tests/test_sglang_plugin.py",
    *(f"tests/test_sglang_{name}.py" for name in ("adapters", "gate", "peer", "stand_in")),
)

# Names of browsers that the dashboard's test can drive.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# One thread per process: the test workers share two cores, and Triton's interpreter is single-threaded anyway.
Env = dict[str, str | None]
INTERPRETED: Env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
COMPILED: Env = {"TRITON_INTERPRET": None}


def group(*names: str) -> list[str]:
    """The requirements of these dependency groups of the root pyproject.toml."""
    return list(nox.project.dependency_groups(PROJECT, *names))


class DevEnvironment:
    """Where the `dev` session put its programs; with `nox --no-venv`, the environment nox itself runs in."""

    bin = Path(sys.executable).parent

    @classmethod
    def run(
        cls, session: nox.Session, program: str, *args: str, env: Env | None = None, silent: bool = False
    ) -> object:
        """Run a program of the shared environment; with `silent`, return what it printed."""
        return session.run(str(cls.bin / program), *args, env=env, silent=silent, external=True)

    @classmethod
    def python(cls, session: nox.Session, *args: str, env: Env | None = None, silent: bool = False) -> object:
        """Run the shared environment's Python."""
        return cls.run(session, "python", *args, env=env, silent=silent)


@nox.session(reuse_venv=True)
def dev(session: nox.Session) -> None:
    """Make .nox/dev: the three packages, editable, with `kda` and every tool. Other sessions use it."""
    if session.virtualenv.bin_paths:
        DevEnvironment.bin = Path(session.virtualenv.bin_paths[0])
    session.install(
        *("-c", str(CONSTRAINTS)),
        *("-e", str(KERNELS), "-e", str(BACKEND), "-e", str(TOOLING)),
        *group("test", "oracle", "lint", "types", "bench"),
    )


@nox.session(venv_backend="none", requires=["dev"])
def lint(session: nox.Session) -> None:
    """Ruff (rules and format); the workflows by their schema, actionlint and zizmor. `-- --fix` mends what ruff can."""
    fix = "--fix" in session.posargs
    paths = [arg for arg in session.posargs if arg != "--fix"] or ["."]
    DevEnvironment.python(session, "-m", "ruff", "check", *(["--fix"] if fix else []), *paths)
    DevEnvironment.python(session, "-m", "ruff", "format", *([] if fix else ["--check"]), *paths)
    workflows = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    schema = ("--builtin-schema", "vendor.github-workflows")
    DevEnvironment.run(session, "check-jsonschema", *schema, *workflows)
    DevEnvironment.run(session, "actionlint", *workflows)
    DevEnvironment.run(session, "zizmor", "--offline", "--no-progress", *workflows)


@nox.session(venv_backend="none", requires=["dev"])
def typecheck(session: nox.Session) -> None:
    """Mypy over the three packages."""
    DevEnvironment.python(session, "-m", "mypy", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """The whole suite on the CPU, kernels in Triton's interpreter; says how many gpu tests it could not run."""
    DevEnvironment.python(session, "-m", "pytest", "-n", "2", *session.posargs, env=INTERPRETED)


@nox.session(venv_backend="none", requires=["dev"])
def gpu(session: nox.Session) -> None:
    """The gpu-marked tests, kernels compiled. Fails without a GPU.

    Writes build/gpu-suite.json, which git ignores: a changed tree is not measured. `-- --summary-json
    docs/gpu-suite.json` writes the one that is committed. On an image that has its own CUDA torch:
    `nox --no-venv --no-install -s gpu`.
    """
    probe = "import importlib.util, torch; print('gpu' * torch.cuda.is_available(), importlib.util.find_spec('xdist'))"
    found = str(DevEnvironment.python(session, "-c", probe, env=COMPILED, silent=True))
    if "gpu" not in found:
        session.error("torch sees no CUDA device. Run this on a GPU machine; `nox -s tests` runs what needs none.")
    posargs = list(session.posargs)
    if not any(arg.startswith("--summary-json") for arg in posargs):
        posargs += ["--summary-json", str(ROOT / "build" / "gpu-suite.json")]
    # Compiling is most of the time: workers share it. Tests that need much memory are grouped on one of them.
    workers = [] if "None" in found else ["-n", "8", "--dist", "loadgroup"]
    env = COMPILED | {"OMP_NUM_THREADS": "2"}
    DevEnvironment.python(session, "-m", "pytest", "-m", "gpu", *workers, *posargs, env=env)


@nox.session(venv_backend="none", requires=["dev"])
def gpu_idle(session: nox.Session) -> None:
    """Fail where this machine's GPU is not free to be measured."""
    DevEnvironment.python(session, "-m", "benchmarks.idle", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def sanitize(session: nox.Session) -> None:
    """Every kernel at small shapes under compute-sanitizer: memcheck, racecheck, initcheck. Needs a GPU."""
    # First without a tool, so that none sees a compiler, and compiling in parallel.
    DevEnvironment.python(session, "-m", "tests.sanitize", "--jobs", "8", env=COMPILED)
    for tool in session.posargs or ("memcheck", "racecheck", "initcheck"):
        command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", str(DevEnvironment.bin / "python"))
        session.run(*command, "-m", "tests.sanitize", env=COMPILED, external=True)


@nox.session(venv_backend="none", requires=["dev"])
def compile(session: nox.Session) -> None:
    """Compile every kernel ahead of time for seven GPU targets, no GPU needed, and check the resource budget.

    Of what the packaged gate tables launch, only what has no entry in their budget yet; `compile_tables` has all of it.
    """
    report = ("-m", "kda_tooling", "compile-report")
    DevEnvironment.python(session, *report, "--check", *session.posargs, env=COMPILED)
    if not session.posargs:
        DevEnvironment.python(session, *report, "--tables", "packaged", "--new", env=COMPILED)


@nox.session(venv_backend="none", requires=["dev"])
def compile_tables(session: nox.Session) -> None:
    """Compile every kernel configuration that the packaged gate tables name, and check it against their budget.

    After `kda tune`: `-- --new --write-budget` adds what is new and drops what is gone. Minutes to hours: one to five
    seconds a configuration.
    """
    posargs = session.posargs or ["--check"]
    report = ("-m", "kda_tooling", "compile-report", "--tables", "packaged", *posargs)
    DevEnvironment.python(session, *report, env=COMPILED)


@nox.session(venv_backend="none", requires=["dev"])
def sglang(session: nox.Session) -> None:
    """The SGLang plugin's tests beside the real wheel, fetched once into .nox/; the gpu-marked ones where a GPU is."""
    folder = ROOT / ".nox" / f"sglang-{SGLANG_VERSION}"
    if not all((folder / file).is_file() for file in SGLANG_FILES):
        downloads = Path(session.create_tmp())
        DevEnvironment.python(
            session, "-m", "pip", "download", "--no-deps", f"sglang=={SGLANG_VERSION}", "-d", str(downloads),
            # its only wheel, whatever this Python is: nothing of it is run but Python files
            "--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64",
        )  # fmt: skip
        (wheel,) = downloads.glob(f"sglang-{SGLANG_VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, SGLANG_FILES)
        wheel.unlink()
    env = COMPILED | {"OMP_NUM_THREADS": "1", "KDA_SGLANG": str(folder), "KDA_SGLANG_WHEEL": str(folder)}
    DevEnvironment.python(session, "-m", "pytest", *SGLANG_TESTS, *session.posargs, env=env)


@nox.session(venv_backend="none", requires=["dev"])
def mutants(session: nox.Session) -> None:
    """Break the kernels on purpose, one fault at a time, and require the named test to go red."""
    DevEnvironment.python(session, str(ROOT / "tests" / "mutants" / "run.py"), *session.posargs, env=INTERPRETED)


@nox.session(venv_backend="none", requires=["dev"])
def demo(session: nox.Session) -> None:
    """`kda demo`: speculate with a small real model in all four lanes, token for token equal to plain decoding."""
    DevEnvironment.python(session, "-m", "kda_tooling", "demo", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def sweep(session: nox.Session) -> None:
    """`kda sweep` on this machine's GPU: `-- --draft-tokens 4 8 --peer sglang=peer --json sweep.json`."""
    DevEnvironment.python(session, "-m", "kda_tooling", "sweep", *session.posargs, env=COMPILED)


@nox.session(venv_backend="none", requires=["dev"])
def bench(session: nox.Session) -> None:
    """Measure this machine into the asv history; `-- --json FILE_OR_FOLDER` stores what was measured elsewhere."""
    DevEnvironment.python(session, "-m", "benchmarks.store", *session.posargs, env=COMPILED)


@nox.session(venv_backend="none", requires=["dev"])
def bench_smoke(session: nox.Session) -> None:
    """Run every asv benchmark once on invented files and store nothing; fails when a benchmark raises."""
    example = str(ROOT / "tests" / "data" / "history")
    DevEnvironment.python(session, "-m", "benchmarks.store", "--dry-run", "--json", example, *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def dashboard(session: nox.Session) -> None:
    """The history as a page in .asv/html that opens without a network; npm brings its scripts, once."""
    DevEnvironment.python(session, "-m", "benchmarks.dashboard", *session.posargs)


@nox.session(venv_backend="none", requires=["dev"])
def dashboard_test(session: nox.Session) -> None:
    """Open the dashboard in a real browser without a network; fails where there is no Chromium or Chrome."""
    if not any(map(shutil.which, BROWSERS)):
        session.error(f"there is no browser on the PATH: install one of {', '.join(BROWSERS)}")
    DevEnvironment.python(session, "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *group("browser"))
    DevEnvironment.python(session, "-m", "pytest", "tests/test_dashboard_browser.py", *session.posargs, env=INTERPRETED)


@nox.session(venv_backend="none", requires=["dev"])
def nightly(session: nox.Session) -> None:
    """What follows a measurement, `--apply` for good: `-- merge FOLDER`, `-- issues`, `-- tighten`, `-- loosen`."""
    DevEnvironment.python(session, "-m", "benchmarks.nightly", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """The three distributions, wheels and sdists, in dist/; `-- v0.1.0`, or a tag's workflow, requires that version."""
    version = nox.project.load_toml(KERNELS / "pyproject.toml")["project"]["version"]
    tagged = os.environ.get("GITHUB_REF_TYPE") == "tag"
    for tag in [*session.posargs, *([os.environ["GITHUB_REF_NAME"]] if tagged else [])]:
        if tag.removeprefix("v") != version:
            session.error(f"the distributions are of version {version}, which is not {tag}")
    session.install("-c", str(CONSTRAINTS), "flit_core")
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    call = "import sys, flit_core.buildapi as api; print(api.build_wheel(sys.argv[1]), api.build_sdist(sys.argv[1]))"
    for package in (KERNELS, BACKEND, TOOLING):
        with session.chdir(package):
            session.run("python", "-c", call, str(dist))


def install_wheels(session: nox.Session, *packages: Path, constraints: Path = CONSTRAINTS) -> None:
    """Build these packages' wheels; install them, what they declare and the test runner, and nothing else."""
    wheels = Path(session.create_tmp()) / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.run("python", "-m", "pip", "wheel", "--no-deps", "-w", str(wheels), *map(str, packages), silent=True)
    session.install("-c", str(constraints), *sorted(map(str, wheels.glob("*.whl"))), *group("test-wheel"))
    session.run("python", "-m", "pip", "check")


def test_wheel(session: nox.Session, package: Path) -> None:
    """Run one package's own tests in the session's environment, kernels in Triton's interpreter."""
    session.run("python", "-m", "pytest", str(package / "tests"), *session.posargs, env=INTERPRETED)


@nox.session
def test_kernels(session: nox.Session) -> None:
    """kda-kernels' tests against its built wheel, in a fresh environment with only what it declares."""
    install_wheels(session, KERNELS)
    test_wheel(session, KERNELS)


@nox.session
def test_backend(session: nox.Session) -> None:
    """kda-backend's tests against the built wheels, in a fresh environment with only what they declare."""
    install_wheels(session, KERNELS, BACKEND)
    test_wheel(session, BACKEND)


@nox.session
def test_tooling(session: nox.Session) -> None:
    """kda-tooling's tests against the built wheels, in a fresh environment with only what they declare."""
    install_wheels(session, KERNELS, BACKEND, TOOLING)
    test_wheel(session, TOOLING)


@nox.session
def lowest(session: nox.Session) -> None:
    """kda-kernels' tests with the oldest triton and numpy it declares, beside the pinned torch (its CPU build)."""
    pins = [line for line in CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in LOWEST]
    pins += [f"{name}=={version}" for name, version in LOWEST.items()]
    constraints = Path(session.create_tmp()) / "constraints-lowest.txt"
    constraints.write_text("\n".join(pins) + "\n")
    install_wheels(session, KERNELS, constraints=constraints)
    test_wheel(session, KERNELS)
