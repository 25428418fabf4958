"""Tests in a browser: one pool and one Chromium for all of them."""
