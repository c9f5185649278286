"""The version of kvstore."""

__version__ = "0.1.0"
