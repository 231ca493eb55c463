"""The place of the CUDA C++ kernels, launched through CuPy. It serves no operation yet; asking for one says so."""

__all__: list[str] = []
