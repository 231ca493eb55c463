"""What the CUDA C++ kernels need of a GPU: compiled by NVRTC for each architecture, with no GPU and no driver.

``python -m ddtree.analysis.kernel_resources`` prints the table of ``kernels/cupy/RESOURCES.md``; ``--write`` writes it.
NVRTC comes with the extra ``compile``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.resources
import itertools
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from ddtree.kdtr import atomic_write
from ddtree.kernels.cupy.program import ADDED_BY_CUPY, OPTIONS, PROGRAMS, program_source

__all__ = ["ARCHITECTURES", "Architecture", "KernelResources", "compile_program", "nvrtc_version", "resources_page"]


@dataclass(frozen=True)
class Architecture:
    """What one multiprocessor has, from the CUDA C++ Programming Guide's table of compute capabilities.

    Attributes
    ----------
    shared_per_block, shared_per_sm : int
        Bytes, static and dynamic together; of each block's, 1,024 more are taken by the system.
    threads_per_sm, blocks_per_sm, registers_per_sm : int
        The most that can be resident.
    """

    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536


ARCHITECTURES = {
    "sm_90": Architecture(232448, 233472, 2048, 32),
    "sm_120": Architecture(101376, 102400, 1536, 24),
}
"""Those that the kernels are written for."""


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs on one architecture.

    Attributes
    ----------
    program, kernel, arch : str
        Which.
    registers : int
        A thread.
    spill_bytes, stack_bytes : int
        Local memory of a thread: registers that did not fit, and arrays that the compiler could not keep in registers.
    static_shared, dynamic_shared : int
        Bytes a block; of dynamic shared memory the most that the launcher takes.
    threads : int
        The most a block, as the source's ``__launch_bounds__`` says; 0 where it says nothing.
    min_blocks : int
        Blocks a multiprocessor that it asks the compiler to make room for; 0 where it says nothing.
    waits : bool
        Whether it waits for the launch before, and reads and writes nothing of the GPU's memory until then: that it may
        be launched early.
    """

    program: str
    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared: int
    dynamic_shared: int
    threads: int
    min_blocks: int
    waits: bool = False

    @property
    def blocks_per_sm(self) -> int:
        """Blocks of the greatest size that one multiprocessor holds at once."""
        has = ARCHITECTURES[self.arch]
        warps = -(-self.threads // 32)
        registers = -(-self.registers * 32 // 256) * 256 * (-(-warps // 4) * 4)  # a warp's in steps of 256
        shared = -(-(self.static_shared + self.dynamic_shared + 1024) // 128) * 128
        return min(
            has.blocks_per_sm,
            has.threads_per_sm // (32 * warps),
            has.registers_per_sm // registers,
            has.shared_per_sm // shared,
        )

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's threads that can be resident, in theory."""
        return self.blocks_per_sm * self.threads / ARCHITECTURES[self.arch].threads_per_sm


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC's library from its wheel.

    Raises
    ------
    ImportError
        It is not installed.
    """
    found = sorted(file for folder in _wheels() for file in folder.glob("*/lib/libnvrtc.so.1?"))
    if not found:
        raise ImportError("NVRTC is not installed: pip install 'ddtree[compile]'")
    library = ctypes.CDLL(str(found[-1]))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _wheels() -> list[Path]:
    try:
        return [Path(folder) for folder in importlib.import_module("nvidia").__path__]
    except ImportError:
        return []


def _include_options() -> list[str]:
    folders = (folder for wheel in _wheels() for folder in sorted(wheel.glob("*/include")))
    return [f"-I{folder}" for folder in folders]


def nvrtc_version() -> str:
    """Such as "13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_program(program: str, arch: str) -> list[KernelResources]:
    """Compile one program for one architecture and return what each of its kernels needs.

    Raises
    ------
    ImportError
        NVRTC is not installed.
    RuntimeError
        It does not compile; the message is the compiler's log.
    """
    options = [f"-arch={arch}", *OPTIONS, *PROGRAMS[program], *ADDED_BY_CUPY, *_include_options()]
    options += ["--ptxas-options=-v", "--no-cache"]  # what comes from the driver's cache has no log
    cubin, ptx, log = _compile(program_source(program), f"{program}.cu", options)
    kernels = _ptxas_report(log)
    entries = set(re.findall(r"Compiling entry function '([^']+)'", log))
    if not entries or set(kernels) != entries:
        raise RuntimeError(f"{program}: the form of the compiler's log has changed:\n{log}")
    stated = _stated_shared(cubin)
    result = []
    for name, (registers, spills, stack, shared) in sorted(kernels.items()):
        threads, min_blocks = _launch_bounds(ptx, name)
        result.append(
            KernelResources(
                *(program, name, arch, registers, spills, stack, shared, stated.get(name, 0), threads, min_blocks),
                _waits(ptx, name),
            )
        )
    return result


def _compile(source: str, name: str, options: list[str]) -> tuple[bytes, str, str]:
    nvrtc = _nvrtc()
    handle = ctypes.c_void_p()

    def check(status: int) -> None:
        if status:
            log = text("ProgramLog") if handle else ""
            raise RuntimeError(f"{name} {options[0]}: {nvrtc.nvrtcGetErrorString(status).decode()}\n{log}")

    def read(what: str) -> bytes:
        size = ctypes.c_size_t()
        check(getattr(nvrtc, f"nvrtcGet{what}Size")(handle, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{what}")(handle, buffer))
        return buffer.raw

    def text(what: str) -> str:
        return read(what).rstrip(b"\0").decode()

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(handle), source.encode(), name.encode(), 0, None, None))
    try:
        encoded = [option.encode() for option in options]
        check(nvrtc.nvrtcCompileProgram(handle, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)))
        return read("CUBIN"), text("PTX"), text("ProgramLog")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def _ptxas_report(log: str) -> dict[str, tuple[int, int, int, int]]:
    """Registers, spilled bytes, stack and static shared memory of each kernel in the assembler's log."""
    entry = re.compile(
        r"Compiling entry function '(?P<name>[^']+)'[^\n]*\n"
        r"(?:(?!.*Compiling entry function).*\n)*?"
        r"ptxas\s+\.?\s*(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads\s*\n"
        r"(?:(?!.*Compiling entry function).*\n)*?"
        r"ptxas info\s+: Used (?P<registers>\d+) registers(?P<rest>.*)"
    )
    report = {}
    for found in entry.finditer(log):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        spills = int(found["stores"]) + int(found["loads"])
        report[found["name"]] = int(found["registers"]), spills, int(found["stack"]), int(shared[1]) if shared else 0
    return report


def _waits(ptx: str, name: str) -> bool:
    """Whether a kernel waits for the launch before ahead of its first access to memory, and of any thread's end."""
    body = re.search(rf"\.entry {name}\(.*?\n}}", ptx, re.DOTALL)
    first = body and re.search(r"griddepcontrol\.wait|\b(?:ld|st|atom|red)\.(?:volatile\.)?global|\bret;", body[0])
    return bool(first and first[0] == "griddepcontrol.wait")


def _launch_bounds(ptx: str, kernel: str) -> tuple[int, int]:
    """Threads a block and blocks a multiprocessor, as ``__launch_bounds__`` gave them; 0 where it did not."""
    head = re.search(rf"\.entry {kernel}\([^)]*\)(?P<directives>[^{{]*)\{{", ptx)
    directives = head["directives"] if head else ""
    threads = re.search(r"\.maxntid (\d+)(?:, (\d+), (\d+))?", directives)
    blocks = re.search(r"\.minnctapersm (\d+)", directives)
    product = 1
    for size in threads.groups() if threads else (0,):
        product *= int(size) if size is not None else 1
    return product, int(blocks[1]) if blocks else 0


def _stated_shared(cubin: bytes) -> dict[str, int]:
    """The constants ``ddtree_shared_NAME`` of a compiled program: bytes by kernel. The file is a 64-bit ELF."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, _ = struct.unpack_from("<HHH", cubin, 0x3A)
    # type, offset, size and link of each section
    sections = [struct.unpack_from("<4xI16xQQI", cubin, sections_at + 64 * i) for i in range(count)]
    return dict(_constants(cubin, sections))


def _constants(cubin: bytes, sections: list[tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    prefix, symbol_table = b"ddtree_shared_", 2
    for kind, offset, size, link in sections:
        if kind != symbol_table:
            continue
        names_at = sections[link][1]
        for at in range(offset, offset + size, 24):
            name_at, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            end = cubin.index(b"\0", names_at + name_at)
            name = cubin[names_at + name_at : end]
            if name.startswith(prefix):
                (stated,) = struct.unpack_from("<I", cubin, sections[section][1] + value)
                yield name.removeprefix(prefix).decode(), stated


def resources_page(rows: Iterable[KernelResources]) -> str:
    """The page ``RESOURCES.md``: a line a program, then one a kernel and architecture; rows of a program together."""
    rows = list(rows)
    lines = [
        "# What the CUDA C++ kernels need",
        "",
        f"Compiled by NVRTC {nvrtc_version()} without a GPU; `python -m ddtree.analysis.kernel_resources --write`",
        "makes this page. No kernel spills. Shared memory is static + dynamic, of the latter the most that a launcher",
        "takes; sm_120 has 101,376 bytes a block. Occupancy is the theoretical share of a multiprocessor's threads.",
        "",
        "## By program",
        "",
        "The most that any kernel of it needs, and the least occupancy, on sm_90 / sm_120.",
        "",
        "| program | kernels | registers | shared memory | occupancy |",
        "|---|--:|--:|--:|--:|",
        *(_summary(name, list(group)) for name, group in itertools.groupby(rows, key=lambda r: r.program)),
        "",
        "## By kernel",
        "",
        "| program | kernel | architecture | threads | registers | shared memory | blocks an SM | occupancy |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r.program} | {r.kernel} | {r.arch} | {r.threads:,} | {r.registers} "
        f"| {r.static_shared:,} + {r.dynamic_shared:,} | {r.blocks_per_sm} | {r.occupancy:.0%} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def _summary(program: str, rows: list[KernelResources]) -> str:
    """One line of the first table."""
    by_arch = [[r for r in rows if r.arch == arch] for arch in ARCHITECTURES]
    cells = (
        str(len(by_arch[0])),
        " / ".join(str(max(r.registers for r in part)) for part in by_arch),
        " / ".join(f"{max(r.static_shared + r.dynamic_shared for r in part):,}" for part in by_arch),
        " / ".join(f"{min(r.occupancy for r in part):.0%}" for part in by_arch),
    )
    return f"| {program} | {' | '.join(cells)} |"


@click.command()
@click.option("--write", is_flag=True, help="Write RESOURCES.md beside the kernels instead of printing it.")
def main(write: bool) -> None:
    """Compile every CUDA C++ kernel for every architecture and say what it needs."""
    try:
        nvrtc_version()
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    jobs = [(program, arch) for program in sorted(PROGRAMS) for arch in ARCHITECTURES]
    console = Console(stderr=True)
    rows = [row for job in track(jobs, "compiling", console=console, transient=True) for row in compile_program(*job)]
    page = resources_page(sorted(rows, key=lambda r: (r.program, r.kernel, list(ARCHITECTURES).index(r.arch))))
    if write:
        target: Any = importlib.resources.files("ddtree.kernels.cupy") / "RESOURCES.md"
        with atomic_write(Path(str(target))) as file:
            file.write(page.encode())
    else:
        click.echo(page, nl=False)


if __name__ == "__main__":
    main()
