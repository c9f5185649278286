"""The library: a store for asyncio, and the same for programs without it."""
