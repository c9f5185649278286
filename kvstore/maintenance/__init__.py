"""Maintenance of a cache on disk that no process serves."""
