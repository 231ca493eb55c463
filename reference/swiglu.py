"""The gated feed-forward layer (Shazeer, arXiv 2002.05202)."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["swiglu"]


def swiglu(x: NDArray[Any], gate_up: NDArray[Any], down: NDArray[Any]) -> NDArray[Any]:
    """``down · (silu(gate · x) * (up · x))`` of each row of x (M, D).

    ``gate_up`` (2I, D) holds gate's rows, then up's; ``down`` is (D, I).
    """
    inner = down.shape[1]
    result = np.empty((len(x), len(down)), x.dtype)
    for i, row in enumerate(x):
        hidden = np.empty(inner, x.dtype)
        for j in range(inner):
            gate = float(gate_up[j] @ row)
            up = float(gate_up[inner + j] @ row)
            # exp of a large argument overflows; of a negative one it does not
            sigmoid = 1 / (1 + math.exp(-gate)) if gate >= 0 else math.exp(gate) / (1 + math.exp(gate))
            hidden[j] = gate * sigmoid * up
        result[i] = down @ hidden
    return result
