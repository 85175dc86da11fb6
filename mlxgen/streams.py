"""The MLX stream that all passes of a thread run on."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx


@cache
def generation_stream() -> Any:
    """The stream all passes run on, one per thread (as in mlx-lm: a busy default stream can't delay a token)."""
    return mx.new_thread_local_stream(mx.default_device())
