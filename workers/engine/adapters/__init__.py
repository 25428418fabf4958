"""LoRA adapters: read, checked, kept in memory, and added to a base model's layers."""
