"""Watching a pool: snapshots, the last hour, `tokenmill top`."""
