"""How far a floating-point result may lie from the exact one: the only place where the suite states such a number."""

from typing import NamedTuple


class Tolerance(NamedTuple):
    """A bound, in the unit that its reason names."""

    bound: float
    reason: str


TOLERANCE: dict[tuple[str, str], Tolerance] = {
    ("topk_log_probs", "float32"): Tolerance(
        1e-6, "times max(1, |log Z|, |logit|): some roundings to float32 of the three, each 6e-8 of its size"
    ),
    ("verify_attention", "float64"): Tolerance(
        1e-12, "relative error of the worst row: sums of some hundred terms, each 1e-16 of its size"
    ),
    ("verify_attention", "float32"): Tolerance(
        1.5, "times the worst row's error of the plain formula in float32, in the worst of four orders of its sums"
    ),
    ("verify_attention", "bfloat16"): Tolerance(
        1.5, "times that of bfloat16 inputs, float32 scores, bfloat16 probabilities and a float32 sum"
    ),
    ("verify_attention", "float16"): Tolerance(
        1.5, "times that of float16 inputs, float32 scores, float16 probabilities and a float32 sum"
    ),
    ("verify_attention", "small cases"): Tolerance(
        2e-6, "relative error of the worst row in float32: some 16 roundings of 1.2e-7 over at most 30 terms"
    ),
    ("portable_math", "float64"): Tolerance(1.0, "units in the last place: what the published polynomials promise"),
    ("choose_tokens", "frequency"): Tolerance(
        4.5, "standard deviations of a token's count, on fixed seeds: 7 in 10^6 seeds go beyond by chance"
    ),
    ("layers", "float64"): Tolerance(
        1e-13, "of the largest element: sums of at most some dozen terms in another order, each 1e-16 of its size"
    ),
    ("layers", "float32"): Tolerance(
        1e-5, "of the largest element: the same at 6e-8, with a few sums and an exponential after each other"
    ),
    ("layers", "bfloat16"): Tolerance(
        1e-2,
        "of the sum of the sizes of its terms: two roundings of 4e-3, of what is between two products and of a sum",
    ),
    ("layers", "float16"): Tolerance(1.2e-3, "of the sum of the sizes of its terms: the same at 5e-4"),
    ("model", "float64"): Tolerance(
        1e-12, "of the largest element: three layers of sums of some hundred terms; 1e-14 is what is seen"
    ),
    ("huggingface", "float64"): Tolerance(
        1e-5, "of the largest logit: norms, routers and eager softmax round to float32 within; 1e-7 is what is seen"
    ),
    ("model", "float32"): Tolerance(
        1e-5, "of the largest element: three layers in float32, no router near a flip; 4e-6 is what is seen"
    ),
    ("draft", "float64"): Tolerance(1e-6, "of a log-prob, which is a float32: one of its last places, up to 8"),
    ("draft", "bfloat16"): Tolerance(
        0.25, "of a log-prob: a pass of three layers whose numbers have 8 bits, each some times 4e-3"
    ),
    ("draft", "float32"): Tolerance(
        1e-3, "of a log-prob: a pass of another shape rounds the hidden states otherwise; 3e-5 is seen in 7,000 rounds"
    ),
}
