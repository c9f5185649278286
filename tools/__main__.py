"""``python -m tools`` is the `kvstore` command."""

import sys

from tools.cli import main

sys.exit(main())
