"""A whole pool on one host: an embedded Redis and supervised processes."""
