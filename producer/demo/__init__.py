"""`tokenmill demo`: a whole pool on this machine, a dozen real prompts, a table."""
