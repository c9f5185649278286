"""Over LMCache's own classes and command; without `make lmcache` nothing is run."""

from __future__ import annotations

import os
import sys

from tests.unpacked import folder_of

collect_ignore_glob = ["test_*.py"]

if os.environ.get("KVSTORE_PEER") == "lmcache":
    collect_ignore_glob.clear()
    sys.path.append(str(folder_of("lmcache")))
