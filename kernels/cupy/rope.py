"""Launch of ``rope.cu``."""

from typing import Any

import numpy as np

from ddtree.kernels.cupy.program import contiguous, launch, suffix_of
from ddtree.trees import DraftTree

__all__ = ["rope"]

THREADS = 256
MOST_PAIRS = 1024


def rope(
    q: Any,
    kv_cache: Any,
    queries: Any,
    latents: Any,
    keys: Any,
    page_table: Any,
    prefix_lens: Any,
    tree: DraftTree,
    *,
    frequencies: Any,
    attention_factor: float = 1.0,
    interleaved: bool = False,
) -> None:
    """Rotate a layer's queries and keys at the nodes' positions, and write the nodes' rows of its cache.

    Parameters
    ----------
    q : array, float, shape (B, N, H, C + R)
        Its last R elements of each head are written, zeros in unused slots; the rest is left alone.
    kv_cache : array, the type of q, shape (pages, S, C + R)
        One layer of the cache. Node i's row ``prefix_len + i`` is written: its latent, then its rotated key. Unused
        slots write nothing.
    queries : array, the type of q, shape (B, N, H, P + R)
        Queries of which the last R elements are to be rotated.
    latents : array, the type of q, shape (B, N, C)
        Normalised latents.
    keys : array, the type of q, shape (B, N, R)
        Keys to be rotated. Nodes may lie apart: a part of the columns of a wider array is read where it is.
    page_table : array, int32, shape (B, max_pages)
        Row r of request b is row ``r % S`` of page ``page_table[b, r // S]``.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request.
    tree : DraftTree
        Its depths and node counts say where nodes stand and which are in use.
    frequencies : array, float64, shape (R / 2,)
        Radians a position of each pair.
    attention_factor : float
        YaRN's factor of cosines and sines.
    interleaved : bool
        Whether pairs are neighbours in ``queries`` and ``keys``, and not elements i and R/2 + i; they come out as the
        latter.
    """
    B, N, H, _ = q.shape
    R, C = keys.shape[-1], latents.shape[-1]
    if R > 2 * MOST_PAIRS:
        raise ValueError(f"keys must have at most {2 * MOST_PAIRS} columns, got {R}")
    size = keys.dtype.itemsize
    if keys.strides[2] != size or keys.strides[0] != N * keys.strides[1]:
        keys = contiguous(keys)
    indices = (page_table, prefix_lens, tree.node_counts, tree.depths)
    launch(
        *("rope", f"rope_{suffix_of(q)}", B * N, THREADS),
        *(contiguous(queries), contiguous(latents), keys, q, kv_cache),
        *(contiguous(array, np.int32) for array in indices),
        *(contiguous(frequencies, np.float64), np.float64(attention_factor)),
        *(np.int32(n) for n in (N, H, queries.shape[-1] - R, C, R)),
        np.int64(keys.strides[1] // size),
        *(np.int32(n) for n in (kv_cache.shape[1], page_table.shape[1], interleaved)),
    )
