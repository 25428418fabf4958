"""GGUF files, read and converted."""
