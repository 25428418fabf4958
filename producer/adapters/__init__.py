"""Adapters as a producer handles them: registering, listing, removing."""
