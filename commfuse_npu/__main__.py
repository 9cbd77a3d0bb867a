"""``python -m commfuse_npu``: the command ``commfuse-npu``."""

from __future__ import annotations

import sys

from commfuse_npu.tools.cli import main

sys.exit(main())
