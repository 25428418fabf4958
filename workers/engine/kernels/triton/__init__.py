"""Kernels for GPUs, in Triton. Imported only where a model runs on one."""
