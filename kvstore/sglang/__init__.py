"""SGLang: kvstore as the storage backend of its hierarchical cache, loaded by name.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache \\
      --hicache-mem-layout page_first --hicache-storage-backend dynamic \\
      --hicache-storage-backend-extra-config '{"backend_name": "kvstore",
        "module_path": "kvstore.sglang", "class_name": "HiCacheKVStore", "interface_v1": 1,
        "kvstore": {"host": "4GiB", "disk": "/nvme/kv", "disk_bytes": "2TiB",
                    "identity": {"weights": "v1"}}}'

A page of SGLang is a chunk. SGLang's own host pool is the tier above; kvstore's host memory is what
its copies to slower tiers pass through. SGLang calls from threads of its own, which may wait. A
fault at run time is a page that is not there.
"""

from __future__ import annotations

from kvstore.sglang.backend import HiCacheKVStore

__all__ = ["HiCacheKVStore"]
