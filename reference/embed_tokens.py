"""What a transformer begins with: a row for each token."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["embed_tokens"]


def embed_tokens(table: NDArray[Any], token_ids: NDArray[np.int32]) -> NDArray[Any]:
    """Row ``token_ids[m]`` of ``table`` (V, D) for each m of M; row 0 for what is not a token, such as padding."""
    rows = np.empty((len(token_ids), table.shape[1]), table.dtype)
    for m, token in enumerate(token_ids):
        rows[m] = table[token if 0 <= token < len(table) else 0]
    return rows
