"""What the strategies shrink to, what they reach, what they never give, and which arguments they refuse."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import InvalidArgument

from ddtree import reference
from ddtree.model import ModelConfig
from ddtree.property_tests import brute_force
from ddtree.property_tests.strategies import (
    DRAFT_KINDS,
    LOGIT_KINDS,
    MAX_TOKEN,
    acceptance_inputs,
    budgets,
    built_trees,
    compaction_inputs,
    corrupted_masks,
    draft_trees,
    drafts,
    logit_batches,
    model_configs,
    paged_caches,
    parent_arrays,
    target_choices,
    visibility_masks,
)

FINDING = settings(
    max_examples=1000, deadline=None, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink]
)


def minimal(strategy, condition=lambda value: True):
    """The value that a failure on ``condition`` shrinks to."""
    return find(strategy, condition, settings=FINDING)


def find_any(strategy, condition):
    """Some value for which ``condition`` holds; an error if none comes up."""
    return find(strategy, condition, settings=settings(FINDING, phases=[Phase.generate]))


def depth(parents):
    return max(len(brute_force.node_path(parents.tolist(), i)) - 1 for i in range(len(parents)))


def deepest(tree):
    return int(tree.depths.max(initial=0))


def has_equal_siblings(tree):
    """Whether two children of one node have one token."""
    for parents, tokens, n in zip(tree.parents, tree.token_ids, tree.node_counts, strict=True):
        children = list(zip(parents[1:n].tolist(), tokens[1:n].tolist(), strict=True))
        if len(set(children)) < len(children):
            return True
    return False


def has_ties(draft):
    drafted = draft.log_probs > -np.inf
    return bool(((draft.log_probs[..., 1:] == draft.log_probs[..., :-1]) & drafted[..., 1:] & drafted[..., :-1]).any())


def trees_with_caches(**bounds):
    """A tree and a cache for it."""
    return draft_trees(min_batch=1, max_nodes=8).flatmap(
        lambda tree: st.tuples(st.just(tree), paged_caches(tree, **bounds))
    )


def crosses_a_page(tree_and_cache):
    """Whether the rows of some tree lie in two pages, the first of which also holds prefix."""
    tree, cache = tree_and_cache
    S, first = cache.data.shape[2], cache.prefix_lens
    return bool(((first % S > 0) & (first // S < (first + tree.node_counts - 1) // S)).any())


def needs_two_pages(tree_and_cache):
    """Whether the rows of some tree lie in more than one page."""
    tree, cache = tree_and_cache
    S, first = cache.data.shape[2], cache.prefix_lens
    return bool((first // S < (first + tree.node_counts - 1) // S).any())


# What they shrink to


def test_drafts_shrink_to_nothing_and_to_two_tied_candidates():
    assert minimal(drafts()).log_probs.shape == (0, 0, 0)
    tied = minimal(drafts(), has_ties)
    assert (tied.log_probs.tolist(), tied.token_ids.tolist()) == ([[[0.0, 0.0]]], [[[0, 1]]])


def test_budgets_shrink_to_nothing():
    assert minimal(budgets()) == 0
    assert minimal(budgets(), lambda budget: budget > 31) == 32


def test_built_trees_shrink_to_no_request_and_to_a_chain():
    assert minimal(built_trees()).batch_size == 0
    assert minimal(built_trees(), lambda tree: deepest(tree) >= 3).parents.tolist() == [[-1, 0, 1, 2]]


def test_parent_arrays_shrink_to_the_root_and_to_a_chain():
    assert minimal(parent_arrays()).tolist() == [-1]
    assert minimal(parent_arrays(), lambda parents: depth(parents) >= 5).tolist() == [-1, 0, 1, 2, 3, 4]
    assert minimal(parent_arrays(), lambda parents: len(parents) >= 33).tolist() == [-1] + [0] * 32


def test_draft_trees_shrink_to_no_request_and_to_two_equal_siblings():
    assert minimal(draft_trees()).batch_size == 0
    tree = minimal(draft_trees(), has_equal_siblings)
    assert (tree.parents.tolist(), tree.token_ids.tolist()) == ([[-1, 0, 0]], [[0, 0, 0]])


def test_target_choices_shrink_to_the_first_childs_token():
    tree, choices = minimal(target_choices(draft_trees(max_nodes=9)), lambda case: deepest(case[0]) >= 2)
    assert (tree.parents.tolist(), choices.tolist()) == ([[-1, 0, 1]], [[0, 0, 0]])


def test_acceptance_inputs_shrink_to_no_limit_and_no_stop():
    inputs = minimal(acceptance_inputs(), lambda inputs: inputs.tree.batch_size > 0)
    assert (inputs.tree.parents.tolist(), inputs.target_token_ids.tolist()) == ([[-1]], [[0]])
    assert inputs.remaining is None
    assert inputs.stop_token_ids is None


def test_paged_caches_shrink_to_empty_prefixes_and_pages_in_order():
    tree, cache = minimal(trees_with_caches(), lambda case: case[1].page_table.shape[1] >= 2)
    assert (tree.node_counts.tolist(), cache.data.shape[2]) == ([2], 1)
    assert (cache.prefix_lens.tolist(), cache.page_table.tolist()) == ([0], [[0, 1]])


def test_logit_batches_shrink_to_nothing_and_to_one_special():
    assert minimal(logit_batches()).shape == (0, 0, 1)
    logits = minimal(logit_batches(), lambda logits: logits.shape[-1] > 1 and np.isnan(logits).any())
    assert (logits.shape, np.isnan(logits).sum(), (logits == 0).sum()) == ((1, 1, 2), 1, 1)


def test_visibility_masks_shrink_to_a_root_and_to_a_chain():
    assert minimal(visibility_masks()).tolist() == [[True]]
    assert minimal(visibility_masks(), lambda mask: mask.sum(-1).max() >= 4).tolist() == np.tri(4, dtype=bool).tolist()


def test_corrupted_masks_shrink_to_the_first_bit():
    mask, corrupted, place = minimal(corrupted_masks())
    assert (mask.tolist(), corrupted.tolist(), place) == ([[True]], [[False]], (0, 0))


def test_model_configs_shrink_to_one_dense_layer_and_to_one_of_experts():
    config = minimal(model_configs())
    assert (config.num_hidden_layers, config.first_k_dense_replace, config.num_attention_heads) == (1, 1, 1)
    assert (config.q_lora_rank, config.yarn) == (None, None)
    config = minimal(model_configs(), lambda config: config.is_moe(0))
    assert (config.num_hidden_layers, config.n_group, config.n_routed_experts) == (1, 1, 2)


# What they reach


@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_drafts_of_each_kind_reach_their_bounds(kind):
    draft = find_any(drafts(kinds=(kind,)), lambda draft: draft.log_probs.shape == (3, 4, 5))
    assert draft.token_ids.shape == (3, 4, 5)


@pytest.mark.parametrize(
    "condition",
    [
        has_ties,
        lambda draft: np.isnan(draft.log_probs).any(),
        lambda draft: np.isneginf(draft.log_probs[..., :1]).any(),  # a depth with nothing to draft
        lambda draft: (np.diff(np.nan_to_num(draft.log_probs, neginf=-99.0)) > 0).any(),  # unsorted after the end
        lambda draft: ((draft.token_ids == 0) & (draft.log_probs > -np.inf)).any(),
        lambda draft: len(draft.log_probs) > 1 and draft.log_probs.size == 0,
        lambda draft: (draft.log_probs < -8).any() and (draft.log_probs > -1e-8).any(),  # sharp
    ],
)
def test_drafts_reach_ties_tails_token_0_and_empty_sizes(condition):
    find_any(drafts(), condition)


@pytest.mark.parametrize("size", [0, 31, 32, 33])
def test_budgets_reach_the_end_of_a_word(size):
    find_any(budgets(), lambda budget: budget == size)


@pytest.mark.parametrize(
    "condition",
    [
        lambda tree: deepest(tree) >= 4,
        lambda tree: (tree.node_counts > 33).any(),
        lambda tree: (tree.node_counts < tree.num_slots).all() and tree.batch_size > 1,
        lambda tree: len(set(tree.node_counts.tolist())) == 3,  # ragged
        lambda tree: tree.used_last_rank.any() and not tree.used_last_rank.all(),
    ],
)
def test_built_trees_reach_depth_words_and_unused_slots(condition):
    find_any(built_trees(), condition)


@pytest.mark.parametrize(
    "condition",
    [
        lambda parents: depth(parents) >= 4,
        lambda parents: len(parents) >= 33,
        lambda parents: np.bincount(parents[1:], minlength=1).max() >= 8 and depth(parents) >= 3,
        lambda parents: len(parents) > 3 and (np.diff(parents) < 0).any(),  # not in the order of a builder
    ],
)
def test_parent_arrays_reach_depth_words_and_branching(condition):
    find_any(parent_arrays(), condition)


@pytest.mark.parametrize("limits", [{"max_depth": 3}, {"max_children": 2}, {"max_depth": 4, "max_children": 2}])
def test_bounded_parent_arrays_still_reach_their_size(limits):
    find_any(parent_arrays(**limits), lambda parents: len(parents) >= 20)


@pytest.mark.parametrize(
    "condition",
    [
        has_equal_siblings,
        lambda tree: deepest(tree) >= 4,
        lambda tree: (tree.node_counts >= 33).any(),
        lambda tree: (tree.node_counts == 1).any() and (tree.node_counts > 4).any(),
        lambda tree: tree.batch_size > 0 and (tree.node_counts < tree.num_slots).all(),
        lambda tree: (tree.token_ids == 0).any() and (tree.token_ids == MAX_TOKEN).any(),
    ],
)
def test_draft_trees_reach_equal_siblings_depth_words_and_unused_slots(condition):
    find_any(draft_trees(), condition)


def leaves_the_first_child(inputs):
    """Whether some accepted node is not the first child of its parent."""
    return any(
        any(i != 0 and i != parents.tolist().index(parents[i], 1) for i in path)
        for path, parents in zip(follow(inputs), inputs.tree.parents, strict=True)
    )


def moved_rows(acceptance):
    """Which accepted nodes have a row of their own to move to."""
    return (acceptance.node_indices != np.arange(acceptance.node_indices.shape[1])) & (acceptance.node_indices >= 0)


def follow(inputs):
    return [
        brute_force.accepted(parents.tolist(), tokens.tolist(), int(n), chosen.tolist())[0]
        for parents, tokens, n, chosen in zip(
            inputs.tree.parents, inputs.tree.token_ids, inputs.tree.node_counts, inputs.target_token_ids, strict=True
        )
    ]


@pytest.mark.parametrize(
    "condition",
    [
        lambda inputs: any(len(path) >= 4 for path in follow(inputs)),
        lambda inputs: any(len(path) >= 3 and path[-1] > len(path) for path in follow(inputs)),  # off the first nodes
        lambda inputs: any(len(path) == 1 < n for path, n in zip(follow(inputs), inputs.tree.node_counts, strict=True)),
        lambda inputs: (inputs.target_token_ids == -1).any(),
        lambda inputs: inputs.remaining is not None and 0 in inputs.remaining,
        lambda inputs: (
            inputs.stop_token_ids is not None and np.isin(inputs.target_token_ids, inputs.stop_token_ids).any()
        ),
    ],
)
def test_acceptance_inputs_reach_long_paths_refusals_limits_and_stops(condition):
    find_any(acceptance_inputs(), condition)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_paged_caches_reach_windows_across_pages(size):
    bounds = {"page_sizes": (size,)}
    find_any(trees_with_caches(**bounds), lambda case: size == 1 or crosses_a_page(case))
    find_any(trees_with_caches(**bounds), lambda case: (np.diff(case[1].page_table[0]) < 0).any())  # not in order


@pytest.mark.parametrize("kind", LOGIT_KINDS)
def test_logit_batches_of_each_kind_reach_ties_and_specials(kind):
    logits = find_any(
        logit_batches(kinds=(kind,)),
        lambda x: np.isnan(x).any() and (x[..., 1:] == x[..., :-1]).any(),
    )
    assert logits.dtype == LOGIT_KINDS[kind][0]


@pytest.mark.parametrize(
    "condition",
    [
        lambda config: config.is_moe(1) and not config.is_moe(0),
        lambda config: config.num_experts_per_tok > config.n_routed_experts // config.n_group,  # of several groups
        lambda config: 1 < config.topk_group < config.n_group,
        lambda config: config.yarn is not None and config.yarn.mscale_all_dim and config.q_lora_rank,
        lambda config: config.tie_word_embeddings and not config.rope_interleave,
    ],
)
def test_model_configs_reach_each_form(condition):
    find_any(model_configs(), condition)


@given(config=model_configs())
def test_model_configs_are_read_back_from_what_they_write(config):
    assert ModelConfig.from_dict(config.to_dict()) == config


# How much of what they give is of the kind that finds faults


def drawn(strategy, *, draws=200):
    """That many values, always the same ones."""
    values = []

    @settings(FINDING, max_examples=draws, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(strategy)
    def look(value):
        values.append(value)

    look()
    assert len(values) >= draws // 2
    return values


def has_branches(tree):
    """Whether some node of some request has two children."""
    return any(np.bincount(p[1:n], minlength=1).max() > 1 for p, n in zip(tree.parents, tree.node_counts, strict=True))


def scores_tie(tree):
    return any(len(set(s[1:n].tolist())) < n - 1 for s, n in zip(tree.scores, tree.node_counts, strict=True))


def is_cut(inputs):
    """Whether a limit or a stop token changes what is accepted."""
    free = reference.accept_tree(inputs.tree, inputs.target_token_ids)
    cut = reference.accept_tree(
        inputs.tree, inputs.target_token_ids, remaining=inputs.remaining, stop_token_ids=inputs.stop_token_ids
    )
    return (free.lengths != cut.lengths).any()


SHARES = {
    # of each strategy, what must be common in what it gives, and the least share: about half of what is seen
    "drafts": (drafts(), {
        "tied candidates": (has_ties, 0.12),
        "depths that end early": (lambda draft: (~(draft.log_probs > -np.inf)).any(), 0.12),
    }),
    "built_trees": (built_trees(), {
        "tied scores": (scores_tie, 0.07),
        "branching": (has_branches, 0.07),
        "under-filled": (lambda tree: (tree.node_counts < tree.num_slots).any(), 0.3),
    }),
    "draft_trees": (draft_trees(), {
        "branching": (has_branches, 0.4),
        "equal siblings": (has_equal_siblings, 0.4),
        "unequal requests": (lambda tree: len(set(tree.node_counts.tolist())) > 1, 0.2),
        "more than a word": (lambda tree: (tree.node_counts > 32).any(), 0.3),
    }),
    "acceptance_inputs": (acceptance_inputs(), {
        "accepted drafts": (lambda inputs: any(len(path) > 1 for path in follow(inputs)), 0.3),
        "off the first child": (leaves_the_first_child, 0.1),
        "cut by a stop or a limit": (is_cut, 0.15),
    }),
    "compaction_inputs": (compaction_inputs(), {"moved rows": (lambda case: moved_rows(case.acceptance).any(), 0.05)}),
    "paged_caches": (trees_with_caches(), {"page crossings": (needs_two_pages, 0.2)}),
    "logit_batches": (logit_batches(), {"ties": (lambda x: (x[..., 1:] == x[..., :-1]).any(), 0.2)}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARES)
def test_share_of_draws_of_each_kind_is_at_least(name):
    strategy, kinds = SHARES[name]
    values = drawn(strategy)
    for kind, (condition, least) in kinds.items():
        share = sum(bool(condition(value)) for value in values) / len(values)
        assert share >= least, f"{kind}: {share:.3f}"


# What they never give


@given(draft=drafts())
def test_drafts_are_sorted_distinct_and_at_most_0_up_to_their_ends(draft):
    assert (draft.log_probs.dtype, draft.token_ids.dtype) == (np.float32, np.int32)
    for place in np.ndindex(draft.log_probs.shape[:2]):
        row, ids = draft.log_probs[place], draft.token_ids[place]
        (width,) = brute_force.drafted_widths(row[None])
        assert (row[:width] <= 0).all()
        assert (np.diff(row[:width]) <= 0).all()
        assert len(set(ids[:width].tolist())) == width
        assert (ids[:width] >= 0).all()
        assert (ids[width:] == -1).all()


@given(parents=parent_arrays(min_nodes=4, max_nodes=9, max_depth=3, max_children=2))
def test_parent_arrays_keep_their_bounds(parents):
    assert parents.dtype == np.int32
    assert 4 <= len(parents) <= 9
    assert parents[0] == -1
    assert ((parents[1:] >= 0) & (parents[1:] < np.arange(1, len(parents)))).all()
    assert depth(parents) <= 3
    assert np.bincount(parents[1:]).max() <= 2


@given(case=trees_with_caches())
def test_rows_in_use_are_numbers_of_one_request_and_all_others_are_nan(case):
    tree, cache = case
    S, used = cache.data.shape[2], np.zeros(cache.data.shape[1:3], np.int64)
    for b, n in enumerate((cache.prefix_lens + tree.node_counts).tolist()):
        for row in range(n):
            used[brute_force.row_place(cache.page_table[b], row, S)] += 1
    assert set(np.unique(used)) <= {0, 1}
    assert np.array_equal(np.isnan(cache.data).all((0, 3)), used == 0)
    assert not np.isnan(cache.data[:, used == 1]).any()


# What they refuse


@pytest.mark.parametrize(
    "strategy, message",
    [
        (parent_arrays(min_nodes=0), "min_nodes=0 must be in 1"),
        (parent_arrays(min_nodes=9, max_nodes=4), "min_nodes=9 must be in 1 … max_nodes=4"),
        (parent_arrays(min_nodes=9, max_depth=2, max_children=2), "no tree of min_nodes=9 has max_depth=2"),
        (draft_trees(min_batch=4, max_batch=3), "min_batch=4 must be in 0 … max_batch=3"),
        (drafts(min_candidates=6), "min_candidates=6"),
        (drafts(max_candidates=99), "max_candidates=99 is larger than the vocabulary"),
        (logit_batches(min_vocab=10), "min_vocab=10"),
    ],
)
def test_impossible_bounds_are_refused(strategy, message):
    with pytest.raises(InvalidArgument, match=message):
        find(strategy, lambda value: True, settings=FINDING)
