"""Programs that use kvstore."""
