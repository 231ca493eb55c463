"""Replay a recorded trace under a policy of your own, beside those that come along. No model is run."""

import numpy as np

from ddtree import build_tree
from ddtree.analysis.acceptance import tau_table
from ddtree.analysis.replay import replay
from ddtree.analysis.trace import shipped_trace
from ddtree.policies import chain, first_nodes, fixed_budget


class FewWhereSure:
    """A small tree where the drafter is sure of the next token, and a large one where it is not."""

    def __init__(self, small, large, sure):
        self.small, self.sure = small, sure
        self.budget = large  # the most nodes besides the root: every policy says so
        self.label = f"{small} where p > {sure:g}, else {large}"  # what tables call it

    def __call__(self, log_probs, token_ids, root_token_ids, prefix_lens):
        """Build the large tree of each request, and keep the first nodes of it: trees nest."""
        tree = build_tree(log_probs, token_ids, root_token_ids, budget=self.budget)
        is_sure = np.exp(log_probs[:, 0, 0]) > self.sure  # (B,): the likeliest token of the first position
        wanted = 1 + np.where(is_sure, self.small, self.budget)  # the root is a node too
        return first_nodes(tree, np.minimum(wanted, tree.node_counts))


trace = shipped_trace().in_memory()  # or open_trace("folder"), of what `ddtree record` wrote
mine = FewWhereSure(16, 64, sure=0.9)
policies = [chain(7), fixed_budget(16), fixed_budget(32), fixed_budget(64), mine]
table = tau_table((policy.label, policy.budget, replay(trace, policy)) for policy in policies)
print(table)  # does it emit more tokens a round (tau) than a fixed budget of as many nodes?
