"""Ties: a difference is explained where exact arithmetic is near one, and nowhere else."""

from typing import Any

import numpy as np
import pytest

from ddtree.analysis.margins import BOUNDS, HeldWeights, Sampling, exact_logits, first_differences
from ddtree.engine import Engine
from ddtree.kdtr import read_kdtr
from ddtree.model import DeepseekV3, golden_bundle, load_model, random_weights
from ddtree.reference.choose_tokens import choose_tokens, gumbel_noise

GOLDEN = read_kdtr(golden_bundle())[0]
PROMPT, TOKENS = GOLDEN["golden/prompt"], GOLDEN["golden/tokens"]
EXACT = load_model(golden_bundle(), dtype="float64")
SAMPLED = Sampling(0.8, 0.9, 3)


def with_token(tokens, place, token):
    changed = tokens.copy()
    changed[place] = token
    return changed


def test_equal_runs_have_no_difference():
    assert first_differences(EXACT, [PROMPT], [TOKENS], [TOKENS.copy()], dtype="float32") == []


def test_the_first_difference_is_named_with_its_distance_from_the_best_token():
    place = 9
    logits = GOLDEN["golden/logits"][len(PROMPT) + place - 1]
    second = int(np.argsort(logits)[-2])
    other = with_token(with_token(TOKENS, place, second), place + 3, 0)
    (found,) = first_differences(EXACT, [PROMPT, PROMPT], [TOKENS] * 2, [TOKENS, other], dtype="float32")
    assert (found.request, found.place, found.explained) == (1, place, False)
    gap = np.sort(logits)[-1] - np.sort(logits)[-2]
    assert found.logits == pytest.approx(gap / logits.std(), rel=1e-6)
    assert BOUNDS["float32"].router < found.router < 1


def test_the_worse_of_the_two_tokens_counts_not_the_second_best():
    worst = int(np.argmin(GOLDEN["golden/logits"][len(PROMPT) + 4 - 1]))
    (found,) = first_differences(EXACT, [PROMPT], [TOKENS], [with_token(TOKENS, 4, worst)], dtype="bfloat16")
    assert found.logits > 3
    assert found.explained == (found.router <= BOUNDS["bfloat16"].router)


def near_tie(gap):
    """A model whose two best tokens after the prompt are ``gap`` deviations apart, and those tokens."""
    model = load_model(golden_bundle(), dtype="float64")
    logits, _ = exact_logits(model, PROMPT)
    best, other = np.argsort(logits)[[-1, -2]].tolist()
    model.output_layer[other] = model.output_layer[best] * (1 - gap * logits.std() / logits[best])
    return model, best, other


@pytest.mark.parametrize(("gap", "explained"), [(1e-5, True), (1e-2, False)])
def test_a_tie_within_the_bound_explains_and_one_beyond_does_not(gap, explained):
    model, best, other = near_tie(gap)
    a, b = (np.array([token], np.int32) for token in (best, other))
    (found,) = first_differences(model, [PROMPT], [a], [b], dtype="float32")
    assert found.logits == pytest.approx(gap, rel=0.05)
    assert found.explained is explained


def test_a_router_near_a_tie_explains():
    model = load_model(golden_bundle(), dtype="float64")
    layer: Any = model._layers[1].mlp
    layer.router[1], layer.bias[1] = layer.router[0], layer.bias[0] + 1e-7  # two experts with nearly one score
    layer.bias[2:] -= 10.0  # and both are chosen: no tie between who is and who is not
    assert exact_logits(model, PROMPT)[1] > 1e-5
    layer.bias[2] += 30.0  # now one of them is left out
    _, router = exact_logits(model, PROMPT)
    assert router == pytest.approx(1e-7, rel=1e-3)
    (found,) = first_differences(model, [PROMPT], [TOKENS], [with_token(TOKENS, 0, 5)], dtype="float32")
    assert found.explained
    assert found.router == pytest.approx(1e-7, rel=1e-3)


def test_a_run_that_ends_early_is_never_explained():
    (found,) = first_differences(EXACT, [PROMPT], [TOKENS], [TOKENS[:5]], dtype="bfloat16")
    assert (found.place, found.explained, found.logits) == (5, False, np.inf)


def test_sampled_tokens_are_judged_with_their_noise_and_nucleus():
    key = 77
    run = Engine(EXACT).generate(
        [PROMPT], 6, mode="autoregressive", request_ids=[key], temperature=0.8, top_p=0.9, seed=3
    )
    tokens = run.tokens[0]
    logits, _ = exact_logits(EXACT, np.concatenate([PROMPT, tokens[:2]]))
    z = (logits - logits.max()) / SAMPLED.temperature
    noisy = z + gumbel_noise(len(z), SAMPLED.seed, key, len(PROMPT) + 1)
    kept = [int(t) for t in np.argsort(-z)[:3]]
    other = next(t for t in kept if t != tokens[2])
    options = {"sampling": SAMPLED, "request_ids": [key], "dtype": "float32"}
    (found,) = first_differences(EXACT, [PROMPT], [tokens], [with_token(tokens, 2, other)], **options)
    assert found.place == 2
    assert not found.explained
    assert found.logits == pytest.approx((noisy[tokens[2]] - noisy[other]) * SAMPLED.temperature / logits.std())
    # a token far outside the nucleus is none that rounding could have chosen
    (found,) = first_differences(EXACT, [PROMPT], [tokens], [with_token(tokens, 2, int(logits.argmin()))], **options)
    assert found.logits == np.inf
    chosen = choose_tokens(
        logits[None, None], temperature=0.8, top_p=0.9, seed=3, request_ids=np.array([key]),
        positions=np.array([[len(PROMPT) + 1]], np.int32),
    )  # fmt: skip
    assert chosen[0, 0] == tokens[2]  # the same noise as the engine's


def test_what_does_not_fit_is_told():
    with pytest.raises(ValueError, match=r"dtype must be one of .*got 'int8'"):
        first_differences(EXACT, [PROMPT], [TOKENS], [TOKENS], dtype="int8")
    with pytest.raises(ValueError, match=r"exact must be a model in float64 on the host, got .*float32"):
        first_differences(load_model(golden_bundle()), [PROMPT], [TOKENS], [TOKENS], dtype="float32")
    with pytest.raises(ValueError, match="must have a run a prompt, 1, got 1 and 2"):
        first_differences(EXACT, [PROMPT], [TOKENS], [TOKENS] * 2, dtype="float32")


def test_held_weights_are_those_of_a_model_in_bfloat16():
    config = EXACT.config
    weights = random_weights(config, seed=0, fused_experts=True)
    held = HeldWeights(weights, "bfloat16")
    assert [*held] == [*weights]
    assert "lm_head.weight" in held
    head, router = "lm_head.weight", "model.layers.1.mlp.gate.weight"
    assert held[head].dtype == "bfloat16"
    assert np.abs(held[head].astype(np.float32) - weights[head]).max() < 2**-8 * np.abs(weights[head]).max()
    assert held[router].dtype == np.float32
    assert HeldWeights(weights, "float32")[head].dtype == np.float32
    assert DeepseekV3(config, held, dtype="float64").dtype == np.float64
