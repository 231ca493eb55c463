"""A backend of CuPy arrays that works on the host: for :mod:`.test_foreign_arrays`, on a machine with a GPU.

``Whole`` has every operation, so that no kernel's fault can show as one of the arrays; ``Wrong`` has one fault.
"""

from typing import Any

import cupy

from ddtree import reference
from ddtree.property_tests.cases import map_arrays
from ddtree.protocols import OPS


def by_way_of_the_host(op):
    """The reference's operation on copies; what it writes into goes back."""

    def call(*args, **kwargs):
        written: Any = args[0] if op == "compact_cache" else kwargs.get("out")
        on_host = [map_arrays(value, cupy.asnumpy) for value in args]
        by_name = {name: map_arrays(value, cupy.asnumpy) for name, value in kwargs.items()}
        result = getattr(reference, op)(*on_host, **by_name)
        if op == "compact_cache":
            written.set(on_host[0])
            return None
        if written is not None:
            written.set(by_name["out"])
            return written
        return map_arrays(result, cupy.asarray)

    call.__name__ = op
    return staticmethod(call)


class Whole:
    """Every operation, right."""

    array_kind = "cupy"


for _op in OPS:
    setattr(Whole, _op, by_way_of_the_host(_op))


class Wrong:
    """Works in place on what it was given."""

    array_kind = "cupy"

    @staticmethod
    def tree_positions(depths, prefix_lens):
        """Adds up where the depths stand."""
        cupy.maximum(depths, 0, out=depths)
        depths += prefix_lens[:, None]
        return depths
