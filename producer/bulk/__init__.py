"""Bulk work: files of requests and documents, driven from the user's side."""
