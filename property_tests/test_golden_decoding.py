"""Decoding the golden models: whatever is drafted, the tokens are those that an independent implementation chose."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ddtree.drafters import NgramDrafter, NoiseLaw, OracleDrafter
from ddtree.engine import Engine
from ddtree.kdtr import read_kdtr
from ddtree.model import golden_bundle, layers, load_model
from ddtree.property_tests.compare import assert_same
from ddtree.property_tests.targets import RandomDrafter
from ddtree.protocols import Drafter, KVCache
from ddtree.trees import chain_tree

BUNDLES = ["tiny", "no_interleave", "no_q_lora", "router_bias", "router_groups", "yarn"]
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "oracle": lambda tokens, V: OracleDrafter(tokens, V),
    "oracle with noise": lambda tokens, V: OracleDrafter(tokens, V, noise=NoiseLaw([[0.4, 0.4]])),
    "hostile": lambda tokens, V: OracleDrafter(tokens, V, noise=NoiseLaw([[0.0]])),
    "random": lambda tokens, V: RandomDrafter(5, V),
    "n-gram": lambda tokens, V: NgramDrafter(),
}
MARGINS = {
    "logits": 1e-3,  # some ten times the error of a float32 logit of these models
    "router": 1e-5,  # some ten times that of a float32 expert's score
}
"""How near to a tie the float64 model must be for a float32 run to go another way."""


def golden(bundle):
    arrays, _ = read_kdtr(golden_bundle(bundle))
    return arrays["golden/prompt"], arrays["golden/tokens"]


def load(bundle, dtype):
    return load_model(golden_bundle(bundle), dtype=dtype, backend="reference")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("bundle", BUNDLES)
def test_golden_tokens_come_out_in_every_mode(bundle, dtype):
    (prompt, tokens), model = golden(bundle), load(bundle, dtype)
    engine = Engine(model, OracleDrafter([tokens], model.vocab_size), backend="reference")
    for mode in ("autoregressive", "chain", "tree"):
        assert_same(engine.generate([prompt], len(tokens), mode=mode).tokens[0], tokens, mode)
    assert engine.generate([prompt], 25).tau == 8.0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_golden_tokens_come_out_with_any_drafter(kind, dtype):
    (prompt, tokens), model = golden("tiny"), load("tiny", dtype)
    drafter = DRAFTERS[kind]([tokens], model.vocab_size)
    generation = Engine(model, drafter, page_size=5, backend="reference").generate([prompt], len(tokens))
    assert_same(generation.tokens[0], tokens)
    assert (generation.tau != 1.0) == kind.startswith("oracle")  # a random model repeats nothing


@pytest.mark.parametrize("kind", DRAFTERS)
def test_sampled_tokens_of_unequal_prompts_are_the_autoregressive_ones(kind):
    (prompt, tokens), model = golden("tiny"), load("tiny", "float64")
    prompts = [prompt, prompt[:3], prompt[4:5]]
    options: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    expected = Engine(model, backend="reference").generate(prompts, 12, mode="autoregressive", **options)
    assert expected.tokens[0].tolist() != tokens[:12].tolist()
    drafter = DRAFTERS[kind](expected.tokens, model.vocab_size)
    stop = int(expected.tokens[1][5])
    actual = Engine(model, drafter, backend="reference").generate(prompts, 12, [stop], **options)
    for request, (got, wanted) in enumerate(zip(actual.tokens, expected.tokens, strict=True)):
        ends = np.flatnonzero(wanted == stop)
        assert_same(got, wanted[: ends[0] + 1] if ends.size else wanted, f"tokens of request {request}")


def margins(model, text):
    """How near the float64 ``model`` is to a tie after ``text``: of its two best logits, and of any expert's choice."""
    router, route_experts = [], layers.route_experts

    def watched(logits, bias, **options):
        scores = np.sort(1 / (1 + np.exp(-logits)) + bias, -1)[:, ::-1]
        k = options["num_experts_per_tok"]
        router.append(float((scores[:, k - 1] - scores[:, k]).min()))
        return route_experts(logits, bias, **options)

    cache = KVCache(model.new_cache(1, len(text)), np.zeros((1, 1), np.int32), np.zeros(1, np.int32))
    with patch.object(layers, "route_experts", watched):
        best = np.sort(model.forward(chain_tree(np.array([text])), cache, last_only=True).logits[0, 0])
    assert len(router) == model.config.num_hidden_layers - model.config.first_k_dense_replace
    return {"logits": float(best[-1] - best[-2]), "router": min(router)}


def unexplained_differences(model, prompts, one, other):
    """``(request, place, margins)`` of first differing tokens where ``model``, in float64, is near no tie."""
    found = []
    for request, (prompt, a, b) in enumerate(zip(prompts, one, other, strict=True)):
        differ = np.flatnonzero(a != b)
        if differ.size:
            near = margins(model, [*prompt, *a[: differ[0]]])
            if all(near[what] >= MARGINS[what] for what in MARGINS):
                found.append((request, int(differ[0]), near))
    return found


def test_float32_tokens_differ_from_one_at_a_time_only_near_a_tie():
    model, exact = load("tiny", "float32"), load("tiny", "float64")
    prompts = np.random.default_rng(2).integers(0, model.vocab_size, (16, 6))
    one = Engine(model, backend="reference").generate(prompts, 12, mode="autoregressive").tokens
    drafter = DRAFTERS["oracle with noise"](one, model.vocab_size)
    generation = Engine(model, drafter, depth=4, budget=8, backend="reference").generate(prompts, 12)
    assert (generation.tau or 0) > 1.5
    assert not unexplained_differences(exact, prompts, one, generation.tokens)


def test_difference_far_from_a_tie_is_not_explained_away():
    exact, (prompt, tokens) = load("tiny", "float64"), golden("tiny")
    wrong = tokens.copy()
    wrong[9] = (wrong[9] + 1) % exact.vocab_size
    ((request, place, near),) = unexplained_differences(exact, [prompt], [tokens], [wrong])
    assert (request, place) == (0, 9)
    best = np.sort(read_kdtr(golden_bundle())[0]["golden/logits"][len(prompt) + 9 - 1])
    assert near["logits"] == pytest.approx(best[-1] - best[-2])
