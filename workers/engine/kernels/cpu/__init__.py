"""CPU kernels: C++ through ctypes, and Numba; in attention they agree to 1e-5."""
