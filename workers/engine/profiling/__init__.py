"""Timing of steps, their phases and kernels, for regression hunts (docs/watching.md).

Nothing here is loaded unless `--profile` asks for it: the engine, its runner and its
kernels are then replaced by ones that keep time, and are otherwise as they are.
"""
