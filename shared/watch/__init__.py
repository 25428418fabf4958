"""The pool as people watch it: one snapshot, and the samples of the last hour."""
