"""The place of the CUDA C++ kernels, launched through CuPy. It serves no operation yet, and says so when asked for one."""

__all__: list[str] = []
