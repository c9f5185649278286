"""The `kvstore` command."""
