"""CPU kernels: C++ through ctypes, and Numba with the same bits."""
