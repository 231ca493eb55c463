"""The gated feed-forward layer, by the two products of ``linear.cu``."""

from typing import Any

from ddtree.kernels.cupy.linear import linear, multiply

__all__ = ["swiglu"]


def swiglu(x: Any, gate_up: Any, down: Any) -> Any:
    """``down · (silu(gate · x) * (up · x))`` of few rows x (M, D). See :func:`ddtree.model.layers.swiglu`.

    Gate and up are multiplied, and silu taken, in one launch; what lies between the two is (M, I) in x's type.
    """
    return linear(multiply("gated", x, gate_up, down.shape[1]), down)
