"""What this machine offers: versions, devices, and which backends can work here."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.resources
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.backends import BACKENDS, BackendUnavailable, get_backend
from ddtree.protocols import OPS

__all__ = [
    "BackendState",
    "backend_states",
    "commit",
    "devices",
    "gpu_timings",
    "gpu_verification",
    "how_to_get",
    "kernel_sources",
    "kernel_sources_hash",
    "sources_of",
    "versions",
]

PACKAGES = {
    "numpy": ("numpy",),
    "ml_dtypes": ("ml_dtypes",),
    "numba": ("numba",),
    "matplotlib": ("matplotlib",),
    "rich": ("rich",),
    "click": ("click",),
    "numba-cuda": ("numba-cuda",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "torch": ("torch",),
}
"""Libraries that ddtree works with, and the names under which they may be installed."""
RECORDS = {
    "bench.json": "timed beside its peers",
    "decoding.json": "decoded beside transformers",
    "soak.json": "soaked",
}
"""What was measured on a GPU, by the file of its results."""
NAMED = 6
"""Files that are named where more have changed."""


@dataclass(frozen=True)
class BackendState:
    """One of our backends, as it stands here.

    Attributes
    ----------
    name : str
        What ``backend=`` takes.
    array_kind : str
        Arrays that it works on.
    ops : tuple of str
        Operations that it has, whether or not it can work here.
    reason : str or None
        Why it cannot work here; None if it can.
    install : str
        The command that brings its library; empty if it needs none.
    """

    name: str
    array_kind: str
    ops: tuple[str, ...]
    reason: str | None
    install: str


def versions() -> dict[str, str | None]:
    """Version of ddtree, Python and each library, None where it is not installed. Nothing is imported."""
    from ddtree import __version__

    return {"ddtree": __version__, "python": platform.python_version()} | {
        name: next(filter(None, map(_version, distributions)), None) for name, distributions in PACKAGES.items()
    }


@functools.cache
def commit() -> str:
    """The commit of the checkout that ddtree is imported from, and whether files changed since; empty if installed."""
    folder = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not someone's checkout that ddtree is installed in
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def how_to_get(library: str) -> str:
    """The command that brings one of ``PACKAGES``."""
    known = {"numba-cuda": BACKENDS["numba_cuda"].install, "cupy": BACKENDS["cupy"].install}
    return known.get(library, f"pip install {PACKAGES[library][0]}")


def devices() -> list[str]:
    """The CPU and, as NVIDIA's driver lists them, the GPUs: one line each."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return [f"CPU: {_cpu_name()}, {cores} cores", *(f"GPU {line}" for line in _gpus())]


@functools.cache
def backend_states() -> tuple[BackendState, ...]:
    """Every backend of ours, in the order of ``BACKENDS``."""
    return tuple(
        BackendState(name, known.array_kind, _ops(known.module), _why_not(name), known.install)
        for name, known in BACKENDS.items()
    )


def kernel_sources_hash(backend: str) -> str:
    """SHA-256 of a backend's kernel sources: names and bytes of its .py, .cu and .cuh files, in order of name."""
    digest = hashlib.sha256()
    for name, content in _kernel_files(backend).items():
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def kernel_sources(backend: str) -> dict[str, Any]:
    """What a record of a measurement says of its kernels: the hash of all sources, and 16 digits of each file's."""
    files = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in _kernel_files(backend).items()}
    return {"sources_sha256": kernel_sources_hash(backend), "sources": files}


def _kernel_files(backend: str) -> dict[str, bytes]:
    folder = importlib.resources.files(BACKENDS[backend].module)
    files = (file for file in folder.iterdir() if file.name.endswith((".py", ".cu", ".cuh")))
    return {file.name: file.read_bytes() for file in sorted(files, key=lambda file: file.name)}


def sources_of(backend: str, ops: Iterable[str]) -> set[str]:
    """Names of the files that operations of a backend consist of: of their names, and what these import and include."""
    files, module, found = _kernel_files(backend), re.escape(BACKENDS[backend].module), set[str]()
    left = [f"{op}{suffix}" for op in ops for suffix in (".py", ".cu")]
    while left:
        name = left.pop()
        if name in files and name not in found:
            found.add(name)
            text = files[name].decode()
            imported = re.findall(rf"\b{module}\.(\w+)", text)
            left += [f"{one}{suffix}" for one in imported for suffix in (".py", ".cu")]
            left += re.findall(r'#include "(\w+\.cuh)"', text)
    return found


def gpu_verification(backend: str) -> str | None:
    """What a backend's kernels were verified on, and whether that still holds; None if there is no record."""
    record = importlib.resources.files(BACKENDS[backend].module) / "verified.json"
    if not record.is_file():
        return None
    seen = json.loads(record.read_text(encoding="utf-8"))
    drawn = sum(seen["examples"].values())
    held, whole = _still_holds(backend, seen, sources_of(backend, seen["examples"])), _still_holds(backend, seen)
    if held != whole and "unchanged" in held:
        others = whole.removeprefix("sources CHANGED since: ")
        held = f"sources of these {len(seen['examples'])} operations unchanged since, others CHANGED: {others}"
    return f"{backend}: {drawn:,} drawn inputs equal, laws {seen['laws']}, on {seen['gpu']}, {seen['date']}; {held}"


def gpu_timings() -> list[str]:
    """Which backends' times on a GPU come with ddtree, and whether they are those of its sources: a line each."""
    lines = []
    results = importlib.resources.files("ddtree.analysis.benchmarks") / "results"
    for folder in sorted(results.iterdir(), key=lambda f: f.name) if results.is_dir() else ():
        for name, what in RECORDS.items():
            if not (folder / name).is_file():
                continue
            report = json.loads((folder / name).read_text(encoding="utf-8"))
            machine = report["machine"]
            backend = report.get("backend") or machine.get("backend") or report["settings"]["backend"]
            gpu = next(line for line in machine["devices"] if line.startswith("GPU")).partition(": ")[2]
            held = _still_holds(backend, machine)
            lines.append(f"{backend}: {what} on {gpu.partition(',')[0]}; {held}")
    return lines


def _still_holds(backend: str, record: dict[str, Any], of: Collection[str] | None = None) -> str:
    """Whether a record is of the sources that are here, all or those ``of`` these names; if not, which are others."""
    now, then = kernel_sources(backend), record.get("sources")
    if record.get("sources_sha256") == now["sources_sha256"]:
        return "sources unchanged since"
    files = now["sources"]
    if not isinstance(then, dict) or then == files:
        return "sources CHANGED since"
    changed = sorted(name for name in files.keys() | then.keys() if files.get(name) != then.get(name))
    if of is not None:
        changed = [name for name in changed if name in of]
        if not changed:
            return "sources unchanged since"
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    return f"sources CHANGED since: {', '.join(changed[:NAMED])}{more}"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Lines such as "0: NVIDIA H200, compute capability 9.0, 143771 MiB, driver 570.1"; none without the driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,name,compute_cap,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ") for line in result.stdout.splitlines() if line.count(", ") == 4)
    return [f"{i}: {name}, compute capability {cc}, {memory}, driver {driver}" for i, name, cc, memory, driver in rows]


def _ops(module: str) -> tuple[str, ...]:
    public = importlib.import_module(module).__all__  # the packages are light, whatever is installed
    return tuple(op for op in OPS if op in public)


def _why_not(name: str) -> str | None:
    if not _ops(BACKENDS[name].module):  # whatever its library, there would be nothing to call
        return f"backend {name!r} has no operation yet"
    try:
        backend = get_backend(name)
        if backend.array_kind == "cupy" and not importlib.import_module("cupy").cuda.runtime.getDeviceCount():
            return f"backend {name!r} needs a CUDA device, and there is none"
    except BackendUnavailable as error:
        return str(error)
    except Exception as error:  # CuPy missing under numba_cuda, or whatever the CUDA runtime raises without a driver
        return f"backend {name!r} needs CuPy and a CUDA device ({error}): {BACKENDS[name].install}"
    return None
