"""Every CUDA C++ kernel compiles for both architectures, without a GPU, and stays within what they have."""

import functools
import importlib
import importlib.metadata
import os
import pickle
import re
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddtree.analysis import kernel_resources, verify_on_gpu
from ddtree.analysis.kernel_resources import ARCHITECTURES, compile_program, nvrtc_version, resources_page
from ddtree.kdtr import atomic_write
from ddtree.kernels import cupy as package
from ddtree.kernels.cupy.program import EARLY, PROGRAMS, program_source

FOLDER = Path(package.__file__).parent


def needs_nvrtc():
    try:
        nvrtc_version()
    except ImportError:
        pytest.skip("optional library nvidia-cuda-nvrtc is not installed")


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory):
    """Where the processes of a run leave what they have compiled, which takes seconds a program, for one another."""
    own = tmp_path_factory.getbasetemp()
    compiled_in.append(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


compiled_in: list[Path] = []


@functools.cache
def compiled(program, arch):
    path = compiled_in[0] / f"compiled_{program}_{arch}.pickle"
    if path.exists():
        return pickle.loads(path.read_bytes())
    kernels = compile_program(program, arch)
    with atomic_write(path) as file:
        file.write(pickle.dumps(kernels))
    return kernels


def test_every_source_is_a_program_and_has_a_launcher():
    assert {path.stem for path in FOLDER.glob("*.cu")} == set(PROGRAMS)
    for op in package.__all__:
        assert (FOLDER / f"{op}.py").is_file()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_fit(program, arch):
    needs_nvrtc()
    page, kernels = (FOLDER / "RESOURCES.md").read_text(encoding="utf-8"), compiled(program, arch)
    stated = set(re.findall(r"^DDTREE_SHARED\((\w+),", program_source(program), re.MULTILINE))
    assert stated <= {k.kernel for k in kernels}
    assert stated == {k.kernel for k in kernels if k.dynamic_shared > 0}, "a stated size was not found in the binary"
    for k in kernels:
        most = 0 if f"NVRTC {nvrtc_version()} " in page else 128  # another compiler may allocate other registers
        assert max(k.spill_bytes, k.stack_bytes) <= most, k
        assert k.static_shared + k.dynamic_shared <= min(ARCHITECTURES[arch].shared_per_block, 101_376), k
        assert 0 < k.threads <= 1024, f"{k}: __launch_bounds__ must say how many threads"
        assert k.threads * max(k.min_blocks, 1) <= ARCHITECTURES[arch].threads_per_sm, k
        assert k.blocks_per_sm >= max(k.min_blocks, 1), k
        assert k.waits or program not in EARLY, f"{k}: what is launched early must wait for the launch before"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_verify_attention_is_launched_with_what_its_source_states(arch):
    needs_nvrtc()
    launcher = importlib.import_module("ddtree.kernels.cupy.verify_attention")
    stated = {k.kernel: k.dynamic_shared for k in compiled("verify_attention", arch) if k.dynamic_shared > 0}
    shared = {"attend": launcher.SHARED, "attend_few": launcher.FEW_SHARED}
    assert stated == {f"{name}_{suffix}": size for name, size in shared.items() for suffix in ("f16", "bf16")}


def test_the_committed_table_is_that_of_the_sources():
    needs_nvrtc()
    page = (FOLDER / "RESOURCES.md").read_text(encoding="utf-8")
    rows = [k for program in sorted(PROGRAMS) for arch in ARCHITECTURES for k in compiled(program, arch)]
    rows.sort(key=lambda r: (r.program, r.kernel, list(ARCHITECTURES).index(r.arch)))
    now = resources_page(rows)
    if f"NVRTC {nvrtc_version()} " in page:
        assert page == now, "python -m ddtree.analysis.kernel_resources --write"
    else:  # another compiler may allocate other registers, but not to other kernels
        names = re.compile(r"^\| \w+ \| \w+ \| \w+ \|", re.MULTILINE)
        assert names.findall(page) == names.findall(now), "python -m ddtree.analysis.kernel_resources --write"


def test_what_does_not_fit_is_seen(monkeypatch):
    needs_nvrtc()
    planted = """
    extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* p) {
        float x[200];
        #pragma unroll
        for (int i = 0; i < 200; ++i) x[i] = p[i * 1024 + threadIdx.x];
        __syncthreads();
        float total = 0;
        #pragma unroll
        for (int i = 0; i < 200; ++i) { total += x[i]; p[i * 7 + threadIdx.x] = total * x[199 - i]; }
    }
    extern "C" __constant__ const unsigned ddtree_shared_spills = 106496;
    """
    monkeypatch.setattr(kernel_resources, "program_source", lambda name: planted)
    monkeypatch.setitem(PROGRAMS, "planted", ())
    (k,) = compile_program("planted", "sm_90")
    assert k.spill_bytes > 0
    assert (k.dynamic_shared, k.threads, k.min_blocks) == (106_496, 1024, 2)
    monkeypatch.setattr(kernel_resources, "program_source", lambda name: "not CUDA C++")
    with pytest.raises(RuntimeError, match=r"planted\.cu -arch=sm_90"):
        compile_program("planted", "sm_90")


def test_without_nvrtc_it_is_said_in_a_line_and_nothing_is_written(monkeypatch):
    kernel_resources._nvrtc.cache_clear()
    monkeypatch.setattr(kernel_resources, "_wheels", list)
    before = (FOLDER / "RESOURCES.md").read_bytes()
    result = CliRunner().invoke(kernel_resources.main, ["--write"])
    kernel_resources._nvrtc.cache_clear()
    assert result.exit_code == 1
    assert result.output == "Error: NVRTC is not installed: pip install 'ddtree[compile]'\n"
    assert (FOLDER / "RESOURCES.md").read_bytes() == before


@pytest.mark.parametrize(
    ("simulated", "options", "told"),
    [
        (True, [], "NUMBA_ENABLE_CUDASIM is set"),
        (False, [], "nvidia-smi lists no GPU here|needs cupy|needs CuPy|needs a CUDA device"),
        (False, ["--examples", "0"], "0 is not in the range"),
    ],
)
def test_without_a_gpu_nothing_is_verified(simulated, options, told, monkeypatch):
    monkeypatch.setattr(verify_on_gpu, "SIMULATED", simulated)
    monkeypatch.setattr(verify_on_gpu, "devices", lambda: ["CPU: some"])
    monkeypatch.setattr(verify_on_gpu, "differential", lambda *args: pytest.fail("inputs were drawn"))
    result = CliRunner().invoke(verify_on_gpu.main, ["--write", *options])
    assert result.exit_code in (1, 2)
    assert re.search(told, result.output)


def test_occupancy_is_what_the_calculator_says():
    def occupancy(arch, threads, registers, shared):
        k = kernel_resources.KernelResources("p", "k", arch, registers, 0, 0, 0, shared, threads, 0)
        return k.blocks_per_sm, k.occupancy

    assert occupancy("sm_90", 256, 32, 0) == (8, 1.0)
    assert occupancy("sm_90", 256, 255, 92_992) == (1, 0.125)
    assert occupancy("sm_90", 1024, 64, 0) == (1, 0.5)
    assert occupancy("sm_120", 256, 40, 0) == (6, 1.0)
    assert occupancy("sm_120", 32, 16, 0) == (24, 0.5)
    assert occupancy("sm_120", 256, 64, 50_000) == (2, pytest.approx(1 / 3))


def test_every_barrier_has_a_comment_above():
    for path in [*FOLDER.glob("*.cu"), *FOLDER.glob("*.cuh")]:
        for above, line in pairwise(path.read_text(encoding="utf-8").splitlines()):
            if re.match(r"\s+__sync(threads|warp)\w*\(", line):
                assert above.lstrip().startswith("//"), f"{path.name}: {line.strip()}"


def test_nvrtc_is_of_the_version_that_the_extra_names():
    needs_nvrtc()
    assert importlib.metadata.version("nvidia-cuda-nvrtc").startswith("13.")
