"""The model: finding, loading, quantizing and running it."""
