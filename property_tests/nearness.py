"""How near a floating-point result must come: log-probs and attention beside their exact values, by brute force."""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ddtree.property_tests import brute_force
from ddtree.property_tests.compare import BeyondToleranceError, assert_close, assert_same, assert_same_form
from ddtree.property_tests.tolerances import TOLERANCE
from ddtree.trees import DraftTree

ROW = ("topk_log_probs", "float32")
LOW_TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def exact_log_probs(row):
    """``(order, log-probs by id, log Z)`` of a list of float; log Z is None where there is no distribution."""
    row = [-math.inf if math.isnan(x) else x for x in row]
    order = sorted(range(len(row)), key=lambda v: (-row[v], v))
    top = max(row)
    if math.isinf(top):
        return order, [-math.inf] * len(row), None
    log_z = top + math.log(math.fsum(math.exp(x - top) for x in row))
    return order, [x - log_z for x in row], log_z


def assert_right_top_k(got, logits, k):
    """Compare ``(log_probs, token_ids)`` with the exact ones, row by row."""
    __tracebackhide__ = True
    log_probs, token_ids = got
    assert_same_form(log_probs, np.empty((*logits.shape[:2], k), np.float32), "log_probs")
    assert_same_form(token_ids, np.empty((*logits.shape[:2], k), np.int32), "token_ids")
    for b, d in np.ndindex(logits.shape[:2]):
        row = logits[b, d].astype(np.float64).tolist()
        order, values, log_z = exact_log_probs(row)
        assert_same(token_ids[b, d], np.array(order[:k], np.int32), f"token_ids[{b}, {d}]")
        finite = [0.0 if math.isinf(x) or math.isnan(x) else abs(x) for x in row]
        scale = [max(1.0, abs(log_z or 0.0), finite[v]) for v in order[:k]]
        wanted = np.array([values[v] for v in order[:k]])
        assert_close(log_probs[b, d], wanted, row=ROW, scale=scale, what=f"log_probs[{b}, {d}]")


class Attention(NamedTuple):
    """What ``verify_attention`` takes, by the same names."""

    q: np.ndarray
    kv_cache: np.ndarray
    page_table: np.ndarray
    prefix_lens: np.ndarray
    tree: DraftTree
    scale: float
    kv_lora_rank: int

    def __repr__(self):
        trees = [p[:n].tolist() for p, n in zip(self.tree.parents, self.tree.node_counts, strict=True)]
        sizes = f"q={self.q.shape}, kv_cache={self.kv_cache.shape}, scale={self.scale}, C={self.kv_lora_rank}"
        return f"Attention(parents={trees}, prefix_lens={self.prefix_lens.tolist()}, {self.q.dtype}, {sizes})"

    def call(self, verify_attention, **options):
        return verify_attention(*self[:5], scale=self.scale, kv_lora_rank=self.kv_lora_rank, **options)

    def dense(self, **types):
        """The dense formula, request by request: (B, N, H, C), zeros in unused slots."""
        q, kv_cache, page_table, prefix_lens, tree, scale, rank = self
        S = kv_cache.shape[1]
        out = np.zeros((*q.shape[:3], rank), types.get("compute", np.float64))
        for b, n in enumerate(tree.node_counts.tolist()):
            prefix = int(prefix_lens[b])
            places = [brute_force.row_place(page_table[b], row, S) for row in range(prefix + n)]
            keys = np.stack([kv_cache[place] for place in places])
            sees = brute_force.ancestor_sets(tree.parents[b].tolist(), n)[:n]
            mask = np.array([[*[True] * prefix, *(j in seen for j in range(n))] for seen in sees])
            out[b, :n] = brute_force.attention(q[b, :n], keys, mask, scale, rank, **types)
        return out

    def plain_error(self, exact):
        """The worst row's error of the dense formula as a kernel may compute it, in the worst of some orders of sums.

        One order alone is no measure: rounding moves its worst row by a factor of two.
        """
        name, C, errors = str(self.q.dtype), self.kv_lora_rank, []
        for seed in range(4):
            rng, rotated = np.random.default_rng(seed), np.arange(C, self.q.shape[-1])
            order = np.concatenate([rng.permutation(C), rng.permutation(rotated)])
            other = self._replace(q=self.q[..., order], kv_cache=self.kv_cache[..., order])
            out = other.dense(compute=np.float32, weight_type=LOW_TYPES.get(name)).astype(self.q.dtype)
            errors.append(worst_row_error(out, exact[..., order[:C]]))
        return max(errors)


def worst_row_error(out, exact):
    """Largest ‖out − exact‖ / ‖exact‖ of any output row that is not zero, over all nodes and heads."""
    sizes = np.linalg.norm(exact, axis=-1)
    errors = np.linalg.norm(out.astype(np.float64) - exact, axis=-1)
    return float((errors[sizes > 0] / sizes[sizes > 0]).max(initial=0.0))


def assert_near(out, case, *, small=False):
    """Within the table's bound of the exact result, and zero where no node is.

    Of a ``small`` case, whose plain formula may be exact by luck, some roundings are allowed in any event.
    """
    __tracebackhide__ = True
    name, exact = str(case.q.dtype), case.dense()
    assert_same_form(out, np.empty(exact.shape, case.q.dtype))
    unused = np.arange(case.tree.num_slots) >= case.tree.node_counts[:, None]
    assert_same(out[unused], np.zeros_like(out[unused]), "unused slots")
    row = "verify_attention", name
    allowed = TOLERANCE[row].bound
    if name != "float64":
        allowed *= case.plain_error(exact)
        least = "verify_attention", "small cases"
        if small and allowed < TOLERANCE[least].bound:
            row, allowed = least, TOLERANCE[least].bound
    error = worst_row_error(out, exact)
    if not error <= allowed:
        raise BeyondToleranceError(f"the worst row is off by {error:.3g}, {allowed:.3g} is allowed", row)
