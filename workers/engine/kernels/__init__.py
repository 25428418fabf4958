"""Numeric kernels: `ops` is what models call, `reference` says what they compute."""
