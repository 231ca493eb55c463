"""Launch of ``append_context.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import launch, suffix_of

__all__ = ["append_context"]

THREADS = 128


def append_context(
    context_keys: Any,
    context_values: Any,
    projected: Any,
    lengths: Any,
    kept: Any,
    key_norms: Any,
    frequencies: Any,
    *,
    eps: float,
) -> None:
    """Write newly committed rows into contexts, in place. See :func:`ddtree.reference.append_context`.

    The contexts may be a part of the requests of larger arrays: layers may lie apart.
    """
    layers, B, H, E, W = context_keys.shape
    J, size = len(projected) // B, projected.dtype.itemsize
    launch(
        *("append_context", f"append_context_{suffix_of(projected)}", (B * J, layers), THREADS),
        *(context_keys, context_values, projected, lengths, kept, key_norms, frequencies, np.float64(eps)),
        *map(np.int32, (J, H, E, W)),
        *(np.int64(array.strides[0] // size) for array in (context_keys, context_values)),
    )
