"""Configuration: one typed model for Python, TOML, the environment and vLLM's extra_config."""

from kvstore.config.model import Config, DiskConfig, TierConfig, read_environment, read_toml
from kvstore.config.values import check_size

__all__ = ["Config", "DiskConfig", "TierConfig", "check_size", "read_environment", "read_toml"]
