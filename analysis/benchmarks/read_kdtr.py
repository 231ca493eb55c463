"""Time of reading a KDTR file with its checks, beside a plain read followed by zlib's CRC-32 and other formats.

The files are read once before they are timed, so that they come from the page cache and the disk plays no part.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from ddtree.kdtr import read_kdtr, write_kdtr


def read_raw(path: str) -> int:
    """Read a whole file into new memory and return its CRC-32: what a checked read cannot do without."""
    data = np.empty(os.path.getsize(path), np.uint8)
    with open(path, "rb", buffering=0) as file:
        done = 0
        while done < data.nbytes:
            done += file.readinto(data.data[done:])
    return zlib.crc32(data.data)


def readers(folder: str, gib: float) -> dict[str, Callable[[], Any]]:
    """Write the same arrays in each format; return the ways to read them."""
    rng = np.random.default_rng(0)
    n = int(gib * (1 << 30) / 4 / 4)
    arrays = {f"layer.{i}": rng.integers(0, 1 << 32, n, np.uint32).view(np.float32) for i in range(4)}
    kdtr, npz = f"{folder}/a.kdtr", f"{folder}/a.npz"
    write_kdtr(kdtr, arrays)
    np.savez(npz, **arrays)  # type: ignore[arg-type] # NumPy's stub takes the names for its option
    ways: dict[str, Callable[[], Any]] = {
        "readinto + zlib.crc32": lambda: read_raw(kdtr),
        "read_kdtr": lambda: read_kdtr(kdtr),
        "np.load (npz, CRC-32)": lambda: dict(np.load(npz, allow_pickle=False)),
    }
    try:
        from safetensors.numpy import load_file, save_file
    except ImportError:
        return ways
    save_file(arrays, f"{folder}/a.safetensors")
    ways["safetensors (no checksum)"] = lambda: load_file(f"{folder}/a.safetensors")
    return ways


@click.command()
@click.option("--gib", default=1.0, show_default=True, help="Size of the file.")
@click.option("--repeats", default=7, show_default=True, type=click.IntRange(1), help="Timed reads of each.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False), help="Where to put the files.")
def main(gib: float, repeats: int, folder: str | None) -> None:
    """Time read_kdtr beside a plain read with CRC-32, NumPy and safetensors."""
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=folder) as made:
        ways = readers(made, gib)
        # the first round fills the page cache; the ways take turns, so that a busy moment hits all of them
        for i in range(repeats + 1):
            for name, read in ways.items():
                start = time.perf_counter()
                read()
                if i:
                    times.setdefault(name, []).append(time.perf_counter() - start)
    base = statistics.median(times["readinto + zlib.crc32"])
    table = Table(title=f"{gib:g} GiB from the page cache, {repeats} reads, {os.cpu_count()} CPUs")
    table.add_column("reader", no_wrap=True)
    for title in ("median s", "min s", "max s", "GiB/s", "ratio of medians"):
        table.add_column(title, justify="right")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        figures = [f"{value:.3f}" for value in (median, min(seconds), max(seconds))]
        table.add_row(name, *figures, f"{gib / median:.2f}", f"{median / base:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
