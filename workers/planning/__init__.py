"""Advises how to run a model on given devices. Pure: no I/O, no torch."""
