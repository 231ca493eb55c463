"""Faults met in tree-speculative decoding, each as a small case with the right value worked out by hand."""

import re
from pathlib import Path

import numpy as np
import pytest

import ddtree
from ddtree.property_tests.brute_force import paths_of
from ddtree.property_tests.compare import assert_same
from ddtree.trees import Acceptance, tree_from_parents


def log(*probabilities):
    """Log-probs (1, L, K), float32, of rows of probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(np.array([probabilities], np.float64)).astype(np.float32)


def build(build_tree, log_probs, budget, *, token_ids=None, root=9):
    ids = np.broadcast_to(np.arange(log_probs.shape[-1]), log_probs.shape) if token_ids is None else token_ids
    return build_tree(log_probs, np.array(ids, np.int32), np.full(len(log_probs), root, np.int32), budget=budget)


def mass(tree):
    return round(float(np.exp(tree.scores[0, 1 : tree.node_counts[0]]).sum()), 6)


def tree_of(parents, token_ids):
    return tree_from_parents(np.array([token_ids]), np.array([parents]))


def choices(*tokens):
    return np.array([tokens], np.int32)


def poisoned_cache(*, pages, S, width=3):
    return np.full((pages, S, width), np.nan, np.float32)


# The builder


def test_token_0_is_a_token_and_counts_are_carried(build_tree):
    tree = build(build_tree, log([0.5, 0.25]), 3, token_ids=[[[0, 4]]], root=0)
    assert tree.token_ids.tolist() == [[0, 0, 4, -1]]
    assert tree.node_counts.tolist() == [3]


def test_a_constant_added_to_logits_changes_neither_ids_nor_order(topk_log_probs):
    # log Z = log 4 for four equal logits, whatever they are.
    for constant in (0.0, 100.0, -10_000.0):
        log_probs, ids = topk_log_probs(np.full((1, 1, 4), constant, np.float32), 3)
        assert ids.tolist() == [[[0, 1, 2]]]
        assert np.abs(log_probs + 1.3862944).max() <= 1e-6 * max(1.0, abs(constant))


def test_padded_columns_of_logit_0_never_win(topk_log_probs):
    logits = np.array([[[-5.0, -4.0, 0.0, 0.0]]], np.float32)
    log_probs, ids = topk_log_probs(logits, 2, vocab_size=2)
    assert ids.tolist() == [[[1, 0]]]
    assert log_probs[0, 0].round(4).tolist() == pytest.approx([-0.3133, -1.3133])  # 1 / (1 + e⁻¹) = 0.7311


def test_a_log_prob_of_minus_infinity_is_never_drafted(build_tree):
    tree = build(build_tree, log([0.5, 0.0], [0.5, 0.0]), 5)
    assert paths_of(tree) == [(0,), (0, 0)]
    assert not np.isnan(tree.scores).any()
    assert tree.scores[0, 3:].tolist() == [-np.inf] * 3


def test_nan_ends_its_own_depth_and_no_other(build_tree):
    log_probs = log([0.5, 0.25, 0.125], [0.5, 0.25, 0.125])
    log_probs[0, 0, 1] = np.nan  # the 0.125 behind it is not read
    assert paths_of(build(build_tree, log_probs, 9)) == [(0,), (0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    "L, K, budget, expected",
    [
        (2, 2, 100, 6),  # 2 + 4 paths
        (1, 3, 100, 3),
        (3, 1, 100, 3),
        (0, 2, 5, 0),
        (2, 2, 0, 0),
    ],
)
def test_budget_above_the_number_of_paths_takes_them_all(build_tree, L, K, budget, expected):
    tree = build(build_tree, np.full((1, L, K), -1, np.float32), budget)
    assert tree.node_counts.tolist() == [1 + expected]
    assert tree.token_ids.shape == (1, 1 + budget)


def test_no_request_gives_no_tree(build_tree):
    tree = build(build_tree, np.zeros((0, 2, 2), np.float32), 3)
    assert tree.token_ids.shape == (0, 4)
    assert tree.visibility_words.shape == (0, 4, 1)


def test_top_k_of_the_whole_vocabulary_and_of_a_vocabulary_of_one(topk_log_probs):
    assert topk_log_probs(np.array([[[0.0, 2.0, 1.0]]], np.float32), 3)[1].tolist() == [[[1, 2, 0]]]
    log_probs, ids = topk_log_probs(np.array([[[-7.0]]], np.float32), 1)
    assert (log_probs.tolist(), ids.tolist()) == ([[[0.0]]], [[[0]]])


def test_more_candidates_than_the_vocabulary_has_are_refused():
    with pytest.raises(ValueError, match=r"k must be in 1 … 2 \(the vocabulary size\), got 3"):
        ddtree.topk_log_probs(np.zeros((1, 1, 5), np.float32), 3, vocab_size=2)


def test_of_equal_scores_the_path_that_is_lexicographically_first_wins(build_tree):
    # (0, 0) and (1) both have 1/4.
    assert paths_of(build(build_tree, log(*[[0.5, 0.25]] * 3), 2)) == [(0,), (0, 0)]


def test_ties_are_in_the_order_of_paths_and_prefixes_come_first(build_tree):
    tied = np.zeros((1, 2, 2), np.float32)
    assert paths_of(build(build_tree, tied, 6)) == [(0,), (0, 0), (0, 1), (1,), (1, 0), (1, 1)]
    assert paths_of(build(build_tree, tied, 4)) == [(0,), (0, 0), (0, 1), (1,)]


def test_scores_are_float64_sums(build_tree):
    # Beside −1, float32 loses 2⁻³⁰: all six would tie, and (0, 0) and (0, 1) come before (1).
    log_probs = np.array([[[-1.0, -1.0], [-(2.0**-30), -(2.0**-29)]]], np.float32)
    tree = build(build_tree, log_probs, 6)
    assert paths_of(tree) == [(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 1)]
    assert tree.scores[0, 3] == -1 - 2.0**-30


def test_a_budget_of_the_depth_limit_need_not_give_a_chain(build_tree):
    tree = build(build_tree, log([0.5, 0.45, 0.05], [0.1, 0.05, 0.01]), 2)
    assert paths_of(tree) == [(0,), (1,)]
    assert mass(tree) == 0.95  # a chain has 0.5 + 0.05


def test_children_join_one_at_a_time_and_not_all_with_their_parent(build_tree):
    tree = build(build_tree, log(*[[0.9, 0.05, 0.03, 0.02]] * 4), 4)
    assert paths_of(tree) == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert mass(tree) == 3.0951  # 0.9 + 0.81 + 0.729 + 0.6561; four siblings have 1


def test_an_exhausted_draft_repeats_no_node(build_tree):
    tree = build(build_tree, log([0.6, 0.4]), 5)
    assert paths_of(tree) == [(0,), (1,)]
    assert tree.node_counts.tolist() == [3]
    assert tree.parents.tolist() == [[-1, 0, 0, -1, -1, -1]]


def test_unused_slots_are_not_accepted_when_the_target_says_0(accept_tree, build_tree):
    tree = build(build_tree, log([0.6, 0.4]), 5, token_ids=[[[3, 4]]])
    kept = accept_tree(tree, np.zeros((1, 6), np.int32))
    assert (kept.lengths.tolist(), kept.bonus_token_ids.tolist()) == ([1], [0])


def test_one_token_under_two_parents_is_two_nodes(build_tree):
    tree = build(build_tree, log([0.5, 0.4], [0.9, 0.1]), 4, token_ids=[[[7, 8], [5, 6]]])
    assert tree.token_ids.tolist() == [[9, 7, 5, 8, 5]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3]]


def test_parents_come_before_their_children(build_tree):
    tree = build(build_tree, log([0.5, 0.4], [0.9, 0.1], [0.8, 0.2]), 14)
    assert (tree.parents[0, 1:] < np.arange(1, 15)).all()
    assert sorted(paths_of(tree), key=len)[-1] == (1, 1, 1)


# Positions and masks


def test_position_is_by_depth_and_not_by_index(tree_positions):
    depths = np.array([[0, 1, 1, 2, 3]], np.int32)
    assert tree_positions(depths, np.array([10], np.int32)).tolist() == [[10, 11, 11, 12, 13]]


def test_row_of_the_query_is_the_node_and_row_0_the_root(verify_attention):
    # Root and one child, no prefix: with q = 0 the root returns its own latent, the child the mean of both.
    tree = tree_of([-1, 0], [1, 2])
    cache = np.array([[[4.0, 1.0], [8.0, 1.0]]], np.float32)
    one = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    out = verify_attention(np.zeros((1, 2, 1, 2), np.float32), cache, *one, tree, scale=1.0, kv_lora_rank=1)
    assert out[..., 0].tolist() == [[[4.0], [6.0]]]


def test_the_shorter_request_does_not_see_past_its_own_tree(verify_attention):
    # Request 0 has three prefix rows of 6 and a root of 2: (3·6 + 2) / 4. Request 1 has a root of 5 alone; its page
    # goes on with rows that are not its own.
    tree = tree_from_parents(np.array([[1], [1]]), np.array([[-1], [-1]]))
    cache = poisoned_cache(pages=2, S=4, width=1)
    cache[0, :, 0], cache[1, 0, 0] = [6, 6, 6, 2], 5
    tables = np.array([[0], [1]], np.int32), np.array([3, 0], np.int32)
    out = verify_attention(np.zeros((2, 1, 1, 1), np.float32), cache, *tables, tree, scale=1.0, kv_lora_rank=1)
    assert out.ravel().tolist() == [5.0, 5.0]


def test_unused_slots_are_zeros_and_poison_reaches_no_row(verify_attention):
    tree = tree_from_parents(np.array([[1, 2, 0]]), np.array([[-1, 0, 0]]), np.array([2]))
    cache = poisoned_cache(pages=2, S=3)
    cache[1, :2] = 1
    q = np.full((1, 3, 2, 3), np.nan, np.float32)
    q[0, :2] = 0.5
    one = np.array([[1]], np.int32), np.zeros(1, np.int32)
    out = verify_attention(q, cache, *one, tree, scale=1.0, kv_lora_rank=2)
    assert_same(out[0, 2], np.zeros((2, 2), np.float32))
    assert_same(out[0, :2], np.ones((2, 2, 2), np.float32))


@pytest.mark.parametrize("N", [3, 33, 35])
def test_packed_masks_are_right_for_every_request(visibility_words, N):
    # A chain in request 0, a star in request 1; the last node of a chain sees all, of a star itself and the root.
    parents = np.array([range(-1, N - 1), [-1, *[0] * (N - 1)]], np.int32)
    words = visibility_words(parents, np.full(2, N, np.int32))
    last = [sum(int(w) << 32 * i for i, w in enumerate(row)) for row in words[:, -1]]
    assert last == [2**N - 1, 2 ** (N - 1) + 1]


def test_requests_with_trees_of_their_own_have_masks_of_their_own(verify_attention):
    # Three nodes each: a chain and a star. The last node sees latents 1, 2, 6 in the chain, and 1, 6 in the star.
    tree = tree_from_parents(np.zeros((2, 3), np.int32), np.array([[-1, 0, 1], [-1, 0, 0]]))
    cache = np.tile(np.array([1, 2, 6], np.float32)[None, :, None], (2, 1, 1))
    tables = np.array([[0], [1]], np.int32), np.zeros(2, np.int32)
    out = verify_attention(np.zeros((2, 3, 1, 1), np.float32), cache, *tables, tree, scale=1.0, kv_lora_rank=1)
    assert out[:, 2, 0, 0].tolist() == [3.0, 3.5]


@pytest.mark.large
def test_mask_memory_does_not_depend_on_the_context(visibility_words):
    # 1,025 nodes: 33 words a node, 135 kB a request, whatever stands before them.
    words = visibility_words(np.arange(-1, 1024, dtype=np.int32)[None], np.array([1025], np.int32))
    assert words.nbytes == 1025 * 33 * 4
    assert words[0, 1024].tolist() == [2**32 - 1] * 32 + [1]


# Acceptance


def test_nothing_after_a_stop_token_is_kept_or_counted(accept_tree):
    # The target agrees with the whole chain 5, 6, 7, and 6 is a stop token: 5 is kept, 6 is the bonus.
    tree = tree_of([-1, 0, 1, 2], [4, 5, 6, 7])
    kept = accept_tree(tree, choices(5, 6, 7, 8), stop_token_ids=np.array([6], np.int32))
    assert kept.node_indices.tolist() == [[0, 1, -1, -1]]
    assert (kept.lengths.tolist(), kept.bonus_token_ids.tolist(), kept.finished.tolist()) == ([2], [6], [True])


def test_one_token_left_emits_one_token_of_a_deep_tree(accept_tree):
    tree = tree_of(list(range(-1, 8)), list(range(9)))
    kept = accept_tree(tree, choices(*range(1, 10)), remaining=np.array([1], np.int32))
    assert kept.node_indices.tolist() == [[0, *[-1] * 8]]
    assert (kept.lengths.tolist(), kept.bonus_token_ids.tolist(), kept.finished.tolist()) == ([1], [1], [True])


def test_length_counts_the_accepted_drafts_and_the_bonus_once(accept_tree):
    kept = accept_tree(tree_of([-1, 0, 0, 2], [4, 5, 6, 7]), choices(6, 0, 7, 3))
    assert kept.node_indices.tolist() == [[0, 2, 3]]  # two drafts: 6 and 7, then the bonus 3
    assert (kept.lengths.tolist(), kept.bonus_token_ids.tolist(), kept.finished.tolist()) == ([3], [3], [False])


def test_a_superset_accepts_at_least_as_much(accept_tree):
    subset, superset = tree_of([-1, 0], [4, 5]), tree_of([-1, 0, 0, 2], [4, 5, 6, 7])
    assert accept_tree(subset, choices(6, 0)).lengths.tolist() == [1]
    assert accept_tree(superset, choices(6, 0, 7, 1)).lengths.tolist() == [3]


def test_of_equal_siblings_the_lowest_index_is_accepted(accept_tree):
    kept = accept_tree(tree_of([-1, 0, 0, 2], [4, 5, 5, 6]), choices(5, 6, 6, 0))
    assert kept.node_indices.tolist() == [[0, 1, -1]]
    assert kept.bonus_token_ids.tolist() == [6]


# Sampling


@pytest.mark.large
def test_a_token_of_probability_0_is_never_chosen(choose_tokens):
    logits = np.tile(np.array([-np.inf, 0.0, -np.inf], np.float32), (1, 300, 1))
    chosen = choose_tokens(logits, temperature=1.0, positions=np.arange(300, dtype=np.int32)[None])
    assert (chosen == 1).all()


@pytest.mark.large
def test_two_equal_tokens_are_each_emitted_half_of_the_time(accept_tree, choose_tokens):
    # Token 0 is always drafted; the tokens emitted are the target's own, so the draft cannot bias them.
    n = 2000
    tree = tree_from_parents(np.tile([5, 0], (n, 1)), np.tile([-1, 0], (n, 1)))
    positions = np.tile(np.arange(2, dtype=np.int32), (n, 1))
    chosen = choose_tokens(np.zeros((n, 2, 2), np.float32), temperature=1.0, positions=positions)
    kept = accept_tree(tree, chosen)
    emitted = np.where(kept.lengths == 2, 0, kept.bonus_token_ids)
    assert abs(int((emitted == 0).sum()) - n // 2) < 100  # 4.5 standard deviations of 22.4


@pytest.mark.large
def test_temperature_is_honoured(choose_tokens):
    # e⁴ : 1 at T = 1/4 and 1 : 1 in the limit: 982 of 1,000, and about 500.
    logits = np.tile(np.array([1.0, 0.0], np.float32), (1, 1000, 1))
    positions = np.arange(1000, dtype=np.int32)[None]
    zeros = [int((choose_tokens(logits, temperature=t, positions=positions) == 0).sum()) for t in (0.25, 1e6)]
    assert abs(zeros[0] - 982) < 20
    assert abs(zeros[1] - 500) < 72


def test_a_position_draws_the_same_token_in_a_tree_and_in_a_one_token_run(choose_tokens):
    logits = np.random.default_rng(0).standard_normal((1, 6, 50)).astype(np.float32)
    positions = np.array([[7, 8, 8, 9, 9, 10]], np.int32)
    options = {"temperature": 1.0, "seed": 3, "request_ids": np.array([4], np.int64)}
    tree_run = choose_tokens(logits, positions=positions, **options)
    one_by_one = [choose_tokens(logits[:, i : i + 1], positions=positions[:, i : i + 1], **options) for i in range(6)]
    assert tree_run.tolist() == [[int(token[0, 0]) for token in one_by_one]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_nan_logit_gives_minus_one_and_not_token_0(choose_tokens, temperature):
    logits = np.array([[[0.0, np.nan, 5.0], [0.0, 90.0, 5.0]]], np.float32)
    positions = np.array([[0, 1]], np.int32)
    assert choose_tokens(logits, temperature=temperature, positions=positions).tolist() == [[-1, 1]]


# The cache


def compacted(compact_cache, rows, page_table, prefix, path, *, S):
    """Rows of one request, one number each, after compaction; the pages in the table's order."""
    pages = np.array(rows, np.float32).reshape(1, -1, S, 1)
    indices = np.array([path], np.int32)
    kept = Acceptance(indices, np.array([len(path)], np.int32), np.zeros(1, np.int32), np.zeros(1, np.bool_))
    after = compact_cache(pages, np.array([page_table], np.int32), np.array([prefix], np.int32), kept)
    return after.ravel().tolist()


def test_overlapping_moves_read_before_they_write(compact_cache):
    after = compacted(compact_cache, [8, 9, 10, 11, 12, 13, 14, 15], [0], 2, [0, 2, 3], S=8)
    assert after == [8, 9, 10, 12, 13, 13, 14, 15]


def test_an_axis_of_size_2_is_no_key_and_value_pair(compact_cache):
    # layers = pages = page size = width = 2: row 1 takes row 2, which is row 0 of the next page, in both layers.
    cache = np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2)
    kept = Acceptance(
        np.array([[0, 2]], np.int32), np.array([2], np.int32), np.zeros(1, np.int32), np.zeros(1, np.bool_)
    )
    after = compact_cache(cache, np.array([[0, 1]], np.int32), np.zeros(1, np.int32), kept)
    assert after.tolist() == [
        [[[0, 1], [4, 5]], [[4, 5], [6, 7]]],
        [[[8, 9], [12, 13]], [[12, 13], [14, 15]]],
    ]


def test_pages_of_the_prefix_are_left_alone(compact_cache):
    # The first two table entries are no pages: whoever visits the prefix fails.
    after = compacted(compact_cache, [0, 1, 2, 3], [2**31 - 1, 2**31 - 1, 1, 0], 4, [0, 3], S=2)
    assert after == [0, 1, 2, 1]


@pytest.mark.parametrize(
    "S, table, expected",
    [
        (1, [5, 3, 1, 0, 2, 4], [2, 1, 4, 3, 4, 5]),  # rows hold 5, 3, 1, 0, 2, 4: page 0 gets 2, page 2 gets 4
        (3, [1, 0], [1, 2, 2, 3, 4, 5]),  # rows hold 3, 4, 5, 0, 1, 2
        (6, [0], [0, 1, 2, 4, 5, 5]),
    ],
)
def test_window_crosses_pages_of_any_size(compact_cache, S, table, expected):
    # Prefix 2, path 0, 2, 3: row 3 takes row 4, and row 4 takes row 5.
    assert compacted(compact_cache, [0, 1, 2, 3, 4, 5], table, 2, [0, 2, 3], S=S) == expected


# Sizes


@pytest.mark.large
def test_more_than_1024_nodes_and_more_than_32_siblings(build_tree, accept_tree):
    # 1,100 candidates at one depth, likeliest first, and one child of the likeliest comes last of all.
    log_probs = np.full((1, 2, 1100), -np.inf, np.float32)
    log_probs[0, 0] = -np.arange(1100) / 8
    log_probs[0, 1, 0] = -200
    tree = build(build_tree, log_probs, 1101)
    assert tree.node_counts.tolist() == [1102]
    assert tree.parents[0].tolist() == [-1, *[0] * 1100, 1]
    assert np.flatnonzero(tree.visibility[0, 1101]).tolist() == [0, 1, 1101]
    target = np.zeros((1, 1102), np.int32)
    target[0, 0] = 1099  # the last sibling, which has no child
    kept = accept_tree(tree, target)
    assert (kept.node_indices.tolist(), kept.bonus_token_ids.tolist()) == ([[0, 1100, -1]], [0])


# The list of kinds

HERE = Path(__file__).parent


def test_every_kind_of_fault_has_tests_and_every_test_here_a_kind():
    rows = re.findall(
        r"^\| (?!kind|\*\*)(.+?) \| (.+) \|$", (HERE / "FIELD_CASES.md").read_text(encoding="utf-8"), re.M
    )
    assert len(rows) > 30
    named: dict[str, set[str]] = {}
    for kind, tests in rows:
        assert "`test_" in tests, kind
        for group in tests.split("; "):
            file, _, names = group.rpartition(".py`: ")
            named.setdefault(file.strip("`") or "test_field_cases", set()).update(re.findall(r"`(test_\w+)`", names))
    for module, names in named.items():
        defined = set(re.findall(r"^def (test_\w+)", (HERE / f"{module}.py").read_text(encoding="utf-8"), re.M))
        assert names <= defined, (module, names - defined)
        if module == "test_field_cases":
            assert defined - names == {"test_every_kind_of_fault_has_tests_and_every_test_here_a_kind"}
