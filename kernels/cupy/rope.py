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
    gain: Any,
    eps: float,
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
        Latents, to be RMS-normalised. Nodes may lie apart: a part of the columns of a wider array is read where it is.
    keys : array, the type of q, shape (B, N, R)
        Keys to be rotated; they too may lie apart.
    page_table : array, int32, shape (B, max_pages)
        Row r of request b is row ``r % S`` of page ``page_table[b, r // S]``.
    prefix_lens : array, int32, shape (B,)
        Committed rows of each request.
    tree : DraftTree
        Its depths and node counts say where nodes stand and which are in use.
    gain : array, the type of q, shape (C,)
        Of the latents' norm.
    eps : float
        Added to their mean square.
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
    latents, keys = _in_rows(latents), _in_rows(keys)
    strides = [np.int64(a.strides[1] // a.dtype.itemsize) for a in (latents, keys)]
    indices = (page_table, prefix_lens, tree.node_counts, tree.depths)
    launch(
        *("rope", f"rope_{suffix_of(q)}", B * N, THREADS),
        *(contiguous(queries), latents, keys, contiguous(gain, q.dtype), q, kv_cache),
        *(contiguous(array, np.int32) for array in indices),
        *(contiguous(frequencies, np.float64), np.float64(attention_factor), np.float64(eps)),
        *(np.int32(n) for n in (N, H, queries.shape[-1] - R, C, R)),
        *strides,
        *(np.int32(n) for n in (kv_cache.shape[1], page_table.shape[1], interleaved)),
    )


def _in_rows(array: Any) -> Any:
    """The (B, N, columns) array itself where its nodes lie at one distance."""
    across, along, element = array.strides
    B, N, _ = array.shape
    in_rows = element == array.dtype.itemsize and (B == 1 or across == N * along)
    return array if in_rows else contiguous(array)
