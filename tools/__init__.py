"""The `kvstore` command."""

# Under two names there would be two registries.
if __name__ != "kvstore.tools":
    raise ImportError(f"import kvstore.tools, not {__name__}")
