"""The compiled CPU kernels, beyond the laws that hold for every backend: sizes, ties, threads, caches, compilation."""

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ml_dtypes import bfloat16

from ddtree import reference
from ddtree.kernels import numba_cpu
from ddtree.property_tests.compare import assert_same, assert_same_acceptance, assert_same_tree
from ddtree.reference import portable_math
from ddtree.trees import Acceptance, tree_from_parents

BUDGETS = (0, 1, 2, 31, 32, 33, 63, 64, 65)


def drafted(seed, B, L, K, spread="random"):
    """A draft whose log-probs are of the kind that ``spread`` names, sorted, and its distinct ids and roots."""
    rng = np.random.default_rng(seed)
    x = -rng.exponential(1.0, (B, L, K)) * rng.choice([0.1, 1.0, 4.0])
    if spread == "sixteenths":
        x = np.round(x * 16) / 16
    elif spread == "bfloat16":
        x = x.astype(bfloat16)
    elif spread == "equal":
        x = np.full_like(x, -0.5)
    elif spread == "zero":
        x = np.zeros_like(x)
    elif spread == "lost in rounding":  # some log-probs vanish beside the others, so different paths round to a tie
        x = np.where(rng.random(x.shape) < 0.5, x * 1e-18, np.round(x))
    log_probs = -np.sort(-x.astype(np.float32), axis=-1)
    token_ids = rng.permuted(
        np.broadcast_to(np.arange(max(K, 1) + 50, dtype=np.int32), (B, L, max(K, 1) + 50)), axis=-1
    )
    return log_probs, np.ascontiguousarray(token_ids[..., :K]), rng.integers(0, 99, B).astype(np.int32)


def with_tails(log_probs, seed):
    """The draft with rows that end early, by NaN or −inf, and with whatever behind it."""
    rng = np.random.default_rng(seed)
    cut = log_probs.copy()
    cut[rng.random(cut.shape) < 0.1] = -np.inf
    cut[rng.random(cut.shape) < 0.1] = np.nan
    return cut


def assert_tree_of_reference(log_probs, token_ids, roots, budget):
    assert_same_tree(
        numba_cpu.build_tree(log_probs, token_ids, roots, budget=budget),
        reference.build_tree(log_probs, token_ids, roots, budget=budget),
    )


SPREADS = ("random", "sixteenths", "bfloat16", "equal", "zero", "lost in rounding")


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_trees_are_the_references_bit_for_bit(spread, budget):
    for seed, (B, L, K) in enumerate([(3, 1, 1), (2, 5, 3), (2, 15, 64), (1, 8, 1), (1, 64, 4)]):
        draft = drafted(seed, B, L, K, spread)
        assert_tree_of_reference(*draft, budget)
        assert_tree_of_reference(with_tails(draft[0], seed), *draft[1:], budget)


@pytest.mark.parametrize("spread", SPREADS)
def test_large_trees_are_the_references(spread):
    assert_tree_of_reference(*drafted(1, 1, 15, 1024, spread), 1024)
    assert_tree_of_reference(*drafted(2, 1, 64, 16, spread), 4096)


@pytest.mark.parametrize("spread", ["equal", "zero", "sixteenths", "lost in rounding"])
def test_ties_of_paths_longer_than_a_code_word(spread):
    # Codes hold 64 ranks of zero: paths beyond that are told apart node by node.
    for L in (62, 63, 64, 65, 66, 130):
        assert_tree_of_reference(*drafted(L, 1, L, 3, spread), 700)


def test_ties_that_differ_only_behind_the_code_word():
    # A chain of 80 likely tokens with two equal candidates at the depths beyond its 64th: the codes are all cut.
    log_probs = np.full((1, 80, 2), -40.0, np.float32)
    log_probs[0, :, 0] = 0.0
    log_probs[0, 66:, 1] = [0.0, -1.0] * 7
    draft = log_probs, np.tile(np.arange(2, dtype=np.int32), (1, 80, 1)), np.zeros(1, np.int32)
    assert_tree_of_reference(*draft, 500)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("budget", [0, 5])
def test_empty_drafts(shape, budget):
    assert_tree_of_reference(*drafted(0, *shape), budget)


def test_many_requests_over_all_threads():
    draft = drafted(5, 900, 4, 6, "sixteenths")
    assert_tree_of_reference(*draft, 20)


def test_arrays_that_may_not_be_written_and_wide_ids_compile_nothing():
    log_probs, token_ids, roots = drafted(0, 2, 3, 4)
    expected = reference.build_tree(log_probs, token_ids, roots, budget=9)
    for array in (log_probs, token_ids, roots):
        array.flags.writeable = False
    assert_same_tree(numba_cpu.build_tree(log_probs, token_ids, roots, budget=9), expected)
    wide = numba_cpu.build_tree(log_probs, token_ids.astype(np.int64), roots.astype(np.int64), budget=9)
    assert_same_tree(wide, expected)


@pytest.mark.parametrize("seed", range(3))
def test_first_fault_of_a_draft_is_the_references(seed):
    rng = np.random.default_rng(seed)
    codes = set()
    for _ in range(400):
        B, L = rng.integers(0, 4, 2)
        K = int(rng.choice([0, 1, 2, 3, 32, 33, 64]))
        log_probs, token_ids, _ = drafted(rng.integers(1 << 30), B, L, K, rng.choice(SPREADS))
        token_ids = (token_ids * rng.choice([1, 65_536])).astype(rng.choice([np.int32, np.int64]))
        for _ in range(rng.integers(0, 4) if log_probs.size else 0):
            place = tuple(rng.integers(0, size) for size in log_probs.shape)
            match rng.integers(0, 4):
                case 0:
                    log_probs[place] = rng.choice([np.nan, -np.inf, np.inf, 1e-30, 0.0, -0.0])
                case 1:
                    log_probs[place] *= rng.choice([0.5, 2.0])
                case 2:
                    token_ids[place] = token_ids[place[0], place[1], 0]
                case 3:
                    wide = [2**31, 2**32 + 5, -(2**40)] if token_ids.dtype == np.int64 else []
                    token_ids[place] = rng.choice([-1, -(2**31), 2**31 - 1, 114, *wide])
        for vocab_size in (-1, 0, 1, 115, 2**31 - 1):
            fault = numba_cpu.find_draft_fault(log_probs, token_ids, vocab_size)
            assert fault == reference.find_draft_fault(log_probs, token_ids, vocab_size)
            codes.add(fault[0])
    assert codes == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i8"])
def test_ids_of_any_integer_type_are_checked_as_they_are(dtype):
    log_probs = np.full((1, 2, 3), -1.0, np.float32)
    token_ids = np.arange(6).reshape(1, 2, 3).astype(dtype)
    most = np.iinfo(dtype).max
    for place, value in (((0, 1, 2), most), ((0, 1, 1), 3), ((0, 0, 0), np.iinfo(dtype).min)):
        changed = token_ids.copy()
        changed[place] = value
        for ids in (token_ids, changed):
            for vocab_size in (-1, 6, 100):
                fault = numba_cpu.find_draft_fault(log_probs, ids, vocab_size)
                assert fault == reference.find_draft_fault(log_probs, ids, vocab_size)


def test_ids_that_share_a_slot_are_not_taken_for_equal():
    log_probs = np.zeros((1, 1, 64), np.float32)
    token_ids = (np.arange(64, dtype=np.int32) << 20)[None, None]
    assert numba_cpu.find_draft_fault(log_probs, token_ids, -1) == (0, 0, 0, 0)
    token_ids[0, 0, 63] = token_ids[0, 0, 7]
    assert numba_cpu.find_draft_fault(log_probs, token_ids, -1) == (4, 0, 0, 63)


def test_many_short_rows_are_each_looked_at_alone():
    log_probs, token_ids = np.zeros((20, 4, 3), np.float32), np.tile(np.arange(3, dtype=np.int32), (20, 4, 1))
    assert numba_cpu.find_draft_fault(log_probs, token_ids, 3) == (0, 0, 0, 0)
    token_ids[17, 2, 2] = 1
    assert numba_cpu.find_draft_fault(log_probs, token_ids, 3) == (4, 17, 2, 2)
    token_ids[17, 2, 2] = 2**31 - 2
    assert numba_cpu.find_draft_fault(log_probs, token_ids, 2**31 - 1) == (0, 0, 0, 0)


def test_the_ends_of_a_row_longer_than_a_block_are_looked_at():
    log_probs, token_ids = np.zeros((1, 1, 33), np.float32), np.arange(33, dtype=np.int32)[None, None].copy()
    log_probs[0, 0, 0] = 0.5
    assert numba_cpu.find_draft_fault(log_probs, token_ids, -1) == (1, 0, 0, 0)
    log_probs[0, 0, 0], log_probs[0, 0, 32], token_ids[0, 0, 32] = 0.0, -np.inf, 0  # an id behind the end
    assert numba_cpu.find_draft_fault(log_probs, token_ids, -1) == (0, 0, 0, 0)
    log_probs[0, 0, :32], log_probs[0, 0, 32] = -1.0, 0.0
    two = np.concatenate([log_probs, np.zeros_like(log_probs)]), np.tile(np.arange(33, dtype=np.int32), (2, 1, 1))
    assert numba_cpu.find_draft_fault(*two, -1) == (2, 0, 0, 32)
    two[0][0, 0] = np.arange(-33, 0)
    assert numba_cpu.find_draft_fault(*two, -1) == (2, 0, 0, 1)


def random_tree(rng, B, N):
    parents = np.array([[-1] + [rng.integers(max(0, i - 4), i) for i in range(1, N)] for _ in range(B)], np.int32)
    return tree_from_parents(rng.integers(0, 3, (B, N)), parents.reshape(B, N), rng.integers(1, N + 1, B))


@pytest.mark.parametrize("seed", range(3))
def test_first_fault_of_a_tree_is_the_references(seed):
    rng = np.random.default_rng(seed)
    codes = set()
    for _ in range(400):
        tree = random_tree(rng, int(rng.integers(0, 4)), int(rng.integers(1, 40)))
        arrays = [tree.token_ids, tree.parents, tree.depths, tree.node_counts]
        max_depth = int(rng.choice([2, tree.max_depth]))
        for array in arrays[:3]:
            if array.size and rng.random() < 0.3:
                array[tuple(rng.integers(0, size) for size in array.shape)] = rng.integers(-2, tree.num_slots + 2)
        if tree.batch_size and rng.random() < 0.1:
            tree.node_counts[rng.integers(0, tree.batch_size)] = rng.choice([0, -1, tree.num_slots + 1])
        fault = numba_cpu.find_tree_fault(*arrays, max_depth)
        assert fault == reference.find_tree_fault(*arrays, max_depth)
        codes.add(fault[0])
    assert codes == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("N", [1, 31, 32, 33, 64, 65, 1025])
def test_acceptance_visibility_and_positions_at_word_sizes(N):
    rng = np.random.default_rng(N)
    tree = random_tree(rng, 3, N)
    choices = rng.integers(-1, 3, (3, N)).astype(np.int32)
    for remaining in (None, np.array([0, 1, 50], np.int32)):
        for stops in (None, np.array([2], np.int32), np.zeros(0, np.int64)):
            options = {"remaining": remaining, "stop_token_ids": stops}
            expected = reference.accept_tree(tree, choices, **options)
            assert_same_acceptance(numba_cpu.accept_tree(tree, choices, **options), expected)
    parents_and_counts = tree.parents, tree.node_counts
    assert_same(numba_cpu.visibility_words(*parents_and_counts), reference.visibility_words(*parents_and_counts))
    lens = np.array([0, 7, 2**20], np.int32)
    assert_same(numba_cpu.tree_positions(tree.depths, lens), reference.tree_positions(tree.depths, lens))


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, bfloat16, np.float32, np.float64])
def test_caches_of_every_item_size_are_compacted(dtype):
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 100, (3, 8, 4, 5)).astype(dtype)
    table = rng.permutation(8).astype(np.int32).reshape(2, 4)
    acceptance = Acceptance(
        np.array([[0, 2, 3, 7], [0, 1, 8, -1]], np.int32),
        np.array([4, 3], np.int32),
        np.zeros(2, np.int32),
        np.zeros(2, np.bool_),
    )
    expected, prefixes = cache.copy(), np.array([3, 7], np.int32)
    reference.compact_cache(expected, table, prefixes, acceptance)
    numba_cpu.compact_cache(cache, table, prefixes, acceptance)
    assert cache.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
def test_ids_of_topk_are_the_references(dtype):
    rng = np.random.default_rng(0)
    for V, vocab_size, k in (
        (1, 1, 1),
        (255, 255, 255),
        (256, 200, 64),
        (257, 257, 3),
        (3000, 2999, 64),
        (600, 600, 0),
    ):
        for scale in (1, 30):
            logits = (np.round(rng.standard_normal((2, 3, V)) * 8 * scale) / 8).astype(dtype)
            logits[rng.random(logits.shape) < 0.1] = -np.inf
            logits[0, 0, rng.integers(0, V)] = np.nan
            logits[1, 0, rng.integers(0, V)] = np.inf
            logits[1, 1] = -np.inf
            _, token_ids = numba_cpu.topk_log_probs(logits, k, vocab_size=vocab_size)
            with np.errstate(invalid="ignore"):
                assert_same(token_ids, reference.topk_log_probs(logits, k, vocab_size=vocab_size)[1])


@pytest.mark.parametrize("top_p", [1.0, 1 - 2**-53, 0.9, 0.5, 1e-9])
@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.float64])
def test_sampled_choices_are_the_references(dtype, top_p):
    rng = np.random.default_rng(0)
    for V in (1, 2, 5, 300):
        logits = (np.round(rng.standard_normal((3, 4, V)) * 12) / 4).astype(dtype)
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        logits[0, 0, 0], logits[0, 1, V - 1] = np.nan, np.inf
        positions = rng.integers(0, 2**31 - 1, (3, 4)).astype(np.int32)
        for temperature in (0.0, 1e-3, 0.7, 1.0, 5.0):
            for request_ids in (None, rng.integers(0, 2**62, 3)):
                options = {
                    "temperature": temperature,
                    "top_p": top_p,
                    "seed": int(rng.integers(0, 2**63)) * 2 + 1,
                    "request_ids": request_ids,
                    "positions": positions,
                }
                choices = numba_cpu.choose_tokens(logits, **options)
                assert_same(choices, reference.choose_tokens(logits, **options))


def test_logarithm_and_exponential_are_the_references_bit_for_bit():
    kernels = importlib.import_module("ddtree.kernels.numba_cpu.choose_tokens")
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(2000), 50 * rng.random(2000), [2.0**-33, 0.7071067811865476, 1.0, 1 - 2.0**-33]])
    assert_same(np.array([kernels.portable_log(value) for value in x]), portable_math.portable_log(x))
    x = -np.concatenate([rng.random(2000), 28 * rng.random(2000), 708 * rng.random(2000), [0.0, 708.0]])
    assert_same(np.array([kernels.portable_exp(value) for value in x]), portable_math.portable_exp(x))


def test_attention_reads_only_what_is_seen():
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 2, 40)
    cache = rng.standard_normal((20, 8, 12)).astype(np.float32)
    table, prefixes = np.arange(20, dtype=np.int32).reshape(2, 10), np.array([0, 30], np.int32)
    q = rng.standard_normal((2, 40, 3, 12)).astype(np.float32)
    options = {"scale": 0.3, "kv_lora_rank": 8}
    clean = numba_cpu.verify_attention(q, cache, table, prefixes, tree, **options)
    for b in range(2):
        for node in range(int(tree.node_counts[b])):
            poisoned = cache.copy()
            row = int(prefixes[b]) + node
            poisoned[table[b, row // 8], row % 8] = np.nan
            out = numba_cpu.verify_attention(q, poisoned, table, prefixes, tree, **options)
            seen = tree.visibility[b, :, node]
            assert np.isnan(out[b][seen]).all()
            assert_same(out[b][~seen], clean[b][~seen])
            assert_same(out[1 - b], clean[1 - b])


def test_table_entries_behind_the_last_row_are_never_looked_up():
    rng = np.random.default_rng(0)
    tree = random_tree(rng, 2, 9)
    q, cache = (rng.standard_normal(shape).astype(bfloat16) for shape in ((2, 9, 2, 6), (6, 4, 6)))
    table = np.array([[0, 1, 2, 3, 4], [5, 3, 4, 1, 0]], np.int32)
    prefixes, options = np.array([2, 0], np.int32), {"scale": 1.0, "kv_lora_rank": 4}
    expected = numba_cpu.verify_attention(q, cache, table, prefixes, tree, **options)
    for b in range(2):
        table[b, -(-(int(prefixes[b]) + int(tree.node_counts[b])) // 4) :] = 2**30
    assert_same(numba_cpu.verify_attention(q, cache, table, prefixes, tree, **options), expected)


def test_eight_threads_at_once_get_their_own_results():
    drafts = [drafted(seed, 60 + seed, 6, 8, "sixteenths") for seed in range(8)]
    expected = [reference.build_tree(*draft, budget=40) for draft in drafts]

    def work(i):
        for _ in range(20):
            assert_same_tree(numba_cpu.build_tree(*drafts[i], budget=40), expected[i])
            assert numba_cpu.find_draft_fault(drafts[i][0], drafts[i][1], -1) == (0, 0, 0, 0)

    with ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(work, i) for i in range(8)]:
            done.result()


def test_error_in_a_thread_reaches_the_caller():
    from ddtree.kernels.numba_cpu.jit import in_parallel

    def kernel(start, stop):
        if start <= 70 < stop:
            raise ZeroDivisionError("in the middle")
        return start, stop

    with pytest.raises(ZeroDivisionError, match="in the middle"):
        in_parallel(kernel, 100)
    pieces = in_parallel(kernel, 60)
    assert [stop for _, stop in pieces[:-1]] == [start for start, _ in pieces[1:]]
    assert (pieces[0][0], pieces[-1][1]) == (0, 60)
    assert in_parallel(kernel, 0) == [(0, 0)]
    assert in_parallel(kernel, 60, grain=60) == [(0, 60)]


def run_python(code, **environment):
    """Run ``code`` in a fresh interpreter with warnings as errors; fail with its output if it fails."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_imports_no_numba():
    run_python(
        "import sys, ddtree.kernels.numba_cpu as c\n"
        "assert 'numba' not in sys.modules and callable(c.tree_positions) and 'numba' not in sys.modules\n"
        "from ddtree.kernels.numba_cpu.visibility_words import fill_words\n"
        "assert c.visibility_words.__name__ == 'visibility_words', 'a module in the place of the function'\n"
        "assert set(c.__all__) <= set(dir(c)) and not hasattr(c, 'no_such_operation')\n"
    )


def test_nowhere_to_cache_is_no_obstacle():
    # A function without a file has no place for a cache either: what numba says of a read-only package and home.
    run_python(
        "from numba import int64\n"
        "from ddtree.kernels.numba_cpu.jit import compiled\n"
        "scope = {}\n"
        "exec('def double(x): return 2 * x', scope)\n"
        "function = compiled(int64(int64))(scope['double'])\n"
        "assert function(21) == 42 and type(function._cache).__name__ == 'NullCache'\n"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_process_works_with_its_own_threads():
    run_python(
        "import os, sys, warnings, numpy as np\n"
        "from ddtree.kernels import numba_cpu\n"
        "arrays = np.zeros((400, 3, 4), np.float32), np.zeros((400, 3, 4), np.int32), np.zeros(400, np.int32)\n"
        "numba_cpu.build_tree(*arrays, budget=64)\n"
        "warnings.simplefilter('ignore')  # Python warns of forking a process that has threads\n"
        "child = os.fork()\n"
        "count = int(numba_cpu.build_tree(*arrays, budget=64).node_counts.sum())\n"
        "if child == 0: os._exit(0 if count == 400 * 65 else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
        NUMBA_NUM_THREADS="2",
    )
