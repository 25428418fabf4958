"""Calibration: what is measured, how it is kept, and how it changes the weights."""
