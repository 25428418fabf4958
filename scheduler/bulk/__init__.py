"""Bulk runs: splitting, sending and joining what their items need, by arq tasks."""
