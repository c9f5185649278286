"""The interfaces by which a server offloads its KV cache, for any engine.

`manager` tracks what is offloaded and decides where it goes, `backend` is one medium of blocks,
`reuse` keeps out what is asked for once, `mediums` are the words for where blocks lie.
Nothing here knows an engine; nothing here imports torch.
"""
