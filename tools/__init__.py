"""The `kvstore` command."""

# Imported under two names, the package would exist twice.
if __name__ != "kvstore.tools":
    raise ImportError(f"import kvstore.tools, not {__name__}")
