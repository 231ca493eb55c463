"""The place of the numba.cuda kernels. It serves no operation yet; asking for one says so."""

__all__: list[str] = []
