"""Launch of ``embed_tokens.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.copy_rows import word_of
from ddtree.kernels.cupy.program import contiguous, empty, launch

__all__ = ["embed_tokens"]

THREADS = 256


def embed_tokens(table: Any, token_ids: Any) -> Any:
    """Rows (M, D) of an embedding (V, D), by tokens (M,). See :func:`ddtree.model.layers.embed_tokens`."""
    table, token_ids = contiguous(table), contiguous(token_ids, np.int32)
    V, D = table.shape
    rows = empty((len(token_ids), D), table.dtype)
    nbytes = D * table.dtype.itemsize
    word = word_of(nbytes) if table.data.ptr % 16 == 0 else 2
    launch(
        *("embed_tokens", f"embed_tokens_{word}", len(token_ids), THREADS),
        *(table, token_ids, rows, np.int32(nbytes // word), np.int32(V)),
    )
    return rows
