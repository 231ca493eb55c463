"""Test a kernel of your own: who sees whom in a draft tree, compiled with numba.

Run this file for a quick look. The whole suite, from the folder of this file, is

    pytest --pyargs ddtree.property_tests --ddtree-backend own_kernel
"""

import numba
import numpy as np

from ddtree.cli import main


def visibility_words(parents, node_counts):
    """The operation under its contract's name: (B, N) parents → (B, N, words) of 32 bits, least significant bit first.

    The public `ddtree.visibility_words` has checked the arguments before it calls this.
    """
    B, N = parents.shape
    words = np.zeros((B, N, (N + 31) // 32), np.uint32)  # padding sees nothing
    fill(parents, node_counts, words)
    return words


@numba.njit
def fill(parents, node_counts, words):
    """Parents come before their children, so a node takes over what its parent sees and adds itself."""
    for b in range(len(parents)):
        for node in range(node_counts[b]):
            if node > 0:  # the root has no parent
                words[b, node] = words[b, parents[b, node]]
            words[b, node, node // 32] |= np.uint32(1) << np.uint32(node % 32)


if __name__ == "__main__":
    # beside the reference on 200 drawn trees; a difference is shrunk to the smallest tree that shows it
    main(["check", "--backend", "own_kernel"])
