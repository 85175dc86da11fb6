"""Errors of code that isn't ours, as errors a user can act on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlxgen.errors import MlxgenError, ModelLoadError


@contextmanager
def foreign_errors(problem: str) -> Iterator[None]:
    """Turn whatever mlx-lm, transformers or a family raises into a `ModelLoadError` that starts with `problem`."""
    try:
        yield
    except MlxgenError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{problem}: {_told(error)}") from error
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # the Rust tokenizer's; not an Exception
            raise ModelLoadError(f"{problem}: {_told(error)}") from error
        raise


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return "it wants to run code that comes with it; pass trust_remote_code=True if you trust it"
    return f"{type(error).__name__}: {text if len(text) <= 400 else f'{text[:400]}…'}"
