"""Bulk runs: what travels between driver and orchestrator, and where it stands."""
