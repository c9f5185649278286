"""Over SGLang's own pools, controller and file backend; without `make sglang` nothing is run."""

from __future__ import annotations

import os

from tests.sglang.pretend import prepare
from tests.unpacked import folder_of

collect_ignore_glob = ["test_*.py"]

if os.environ.get("KVSTORE_PEER") == "sglang":
    collect_ignore_glob.clear()
    prepare(str(folder_of("sglang")))
