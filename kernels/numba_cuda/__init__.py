"""The place of the numba.cuda kernels. It serves no operation yet, and says so when asked for one."""

__all__: list[str] = []
