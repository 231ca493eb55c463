"""The gated feed-forward layer (Shazeer, arXiv 2002.05202)."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.reference.linear import linear
from ddtree.reference.rms_norm import rms_norm

__all__ = ["swiglu"]


def swiglu(
    x: NDArray[Any],
    gate_up: NDArray[Any],
    down: NDArray[Any],
    *,
    gain: NDArray[Any] | None = None,
    eps: float = 0.0,
    residual: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """``down · (silu(gate · x) * (up · x))`` of each row of x (M, D).

    ``gate_up`` (2I, D) holds gate's rows, then up's; ``down`` is (D, I). With a ``gain`` (D,), x is normalised by it
    first; ``residual`` (M, D) is added.
    """
    inner = down.shape[1]
    hidden = np.empty((len(x), inner), x.dtype)
    for i, row in enumerate(x if gain is None else rms_norm(x, gain, eps=eps)):
        for j in range(inner):
            gate = float(gate_up[j] @ row)
            up = float(gate_up[inner + j] @ row)
            # exp of a large argument overflows; of a negative one it does not
            sigmoid = 1 / (1 + math.exp(-gate)) if gate >= 0 else math.exp(gate) / (1 + math.exp(gate))
            hidden[i, j] = gate * sigmoid * up
    return linear(hidden, down, residual=residual)
