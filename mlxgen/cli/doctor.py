"""`mlxgen doctor`: what this machine is, and, with a model, whether the promises hold on it."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Final

from mlxgen.cancellation import CancelToken
from mlxgen.cli import cached, exitcodes
from mlxgen.cli.console import Console
from mlxgen.cli.findings import Finding
from mlxgen.cli.overview import folder_size
from mlxgen.errors import MlxgenError

_OLDEST_MACOS: Final = 14
_PACKAGES: Final = ("mlxgen", "mlx", "mlx-lm", "transformers", "huggingface-hub", "numpy", "pillow", "av")


def run(args: argparse.Namespace, console: Console, cancel: CancelToken) -> int:
    """Print one line per finding; exit code 1 if anything is broken."""
    if args.resume_folder is not None:
        from mlxgen.cli.proofs import resume_all
        from mlxgen.cli.settings import load_model

        resume_all(args.resume_folder, load_model(args, console, cancel), console, cancel)
        return exitcodes.OK
    broken = 0
    for finding in _findings(args, console, cancel):
        broken += finding.holds is False
        if not args.quiet or finding.holds is False:
            console.write(finding.line() + "\n")
        cancel.checkpoint()
    return exitcodes.ERROR if broken else exitcodes.OK


def _findings(args: argparse.Namespace, console: Console, cancel: CancelToken) -> Iterator[Finding]:
    yield from environment()
    if args.model is None:
        return
    from mlxgen.cli.proofs import prove
    from mlxgen.cli.settings import load_model

    began_s = time.perf_counter()
    model = load_model(args, console, cancel)
    seconds = time.perf_counter() - began_s
    yield Finding("model", f"{model.name}: {model.num_bytes / 1e6:.0f} MB, loaded and identified in {seconds:.1f} s")
    notice = getattr(model.vision, "notice", "")
    if notice:
        yield Finding("vision family", notice)
    yield from prove(model, child_command(args), console, cancel)


def child_command(args: argparse.Namespace) -> list[str]:
    """The command of the second process, to which a folder is appended: the same model, loaded in the same way."""
    command = [sys.executable, "-m", "mlxgen", "doctor", "--model", args.model]
    for flag in ("revision", "adapter_path"):
        value = getattr(args, flag)
        if value is not None:
            command += [f"--{flag.replace('_', '-')}", value]
    for flag in ("trust_remote_code", "offline"):
        if getattr(args, flag):
            command.append(f"--{flag.replace('_', '-')}")
    return [*command, "--resume-folder"]


# -- the environment -------------------------------------------------------------------------------------------------


def environment() -> Iterator[Finding]:
    """Versions, machine, device, memory, folders."""
    yield Finding("versions", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    yield Finding("python", f"{platform.python_version()} ({sys.executable})", sys.version_info >= (3, 11))
    yield _system()
    yield from _device()
    yield _cache_folder()
    yield from _families()
    if find_spec("pillow_heif") is None:
        yield Finding("HEIC pictures", "can't be read; pip install 'mlxgen[heic]'")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(missing)"


def _system() -> Finding:
    machine = platform.machine()
    if sys.platform != "darwin":
        return Finding("system", f"{platform.system()} {platform.release()} on {machine} (MLX runs on the CPU or CUDA)")
    release = platform.mac_ver()[0]
    if _sysctl("sysctl.proc_translated") == "1" or machine != "arm64":
        remedy = "install an arm64 Python (for instance: brew install python@3.12)"
        return Finding("system", f"macOS {release}, but Python runs under Rosetta ({machine}); {remedy}", False)
    if int(release.split(".")[0] or 0) < _OLDEST_MACOS:
        return Finding("system", f"macOS {release} is too old for MLX; update to macOS {_OLDEST_MACOS} or later", False)
    return Finding("system", f"macOS {release} on {_sysctl('machdep.cpu.brand_string') or machine}", True)


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _device() -> Iterator[Finding]:
    try:
        import mlx.core as mx

        from mlxgen.models.memory import available_bytes
        from mlxgen.snapshot.export import device_name

        total = mx.array([1.0, 2.0]).sum().item()
    except Exception as error:
        yield Finding("mlx", f"doesn't work here: {type(error).__name__}: {error}; install it again", False)
        return
    yield Finding("device", f"{mx.default_device()}, {device_name()}", total == 3.0)
    recommended = mx.device_info().get("max_recommended_working_set_size")
    shown = "" if recommended is None else f"; the GPU's recommended working set is {int(recommended) / 1e9:.1f} GB"
    yield Finding("memory", f"{available_bytes() / 1e9:.1f} GB available{shown}")


def _cache_folder() -> Finding:
    from mlxgen.models.cachedir import make_cache_folder

    try:
        folder = make_cache_folder()
        writable = os.access(folder, os.W_OK)
        paths = cached.snapshot_paths(cached.snapshots_folder())
        used = sum(folder_size(path) for path in paths)
        budget = cached.budget_bytes()
    except MlxgenError as error:
        return Finding("cache folder", str(error), False)
    detail = f"{folder}, {len(paths)} snapshots of {used / 1e6:.1f} MB (budget {budget / 1e9:.1f} GB)"
    return Finding("cache folder", detail if writable else f"{folder} can't be written to; set MLXGEN_CACHE", writable)


def _families() -> Iterator[Finding]:
    from mlxgen.models.families import installed_families

    try:
        installed = installed_families()
        names = sorted({one.family.name for one in installed if not one.fallback})
        fallbacks = [one.family for one in installed if one.fallback]
    except Exception as error:
        yield Finding("vision families", f"can't be loaded: {type(error).__name__}: {error}", False)
        return
    yield Finding("vision families", ", ".join(names) or "none installed")
    for family in fallbacks:
        yield Finding(family.name, getattr(family, "status", "gets model types that no other family has"))
