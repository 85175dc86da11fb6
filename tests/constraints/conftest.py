"""The small tokenizers of every kind that `tests/text` builds are used here too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
sys.path.insert(0, str(Path(__file__).parent))
