"""KV memory: the block pool and its books (no torch), and the tensors."""
