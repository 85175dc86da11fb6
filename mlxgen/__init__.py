"""mlxgen: generation on Apple's MLX that stops anywhere, keeps everything that was done, and goes on from exactly
there.

The names are imported at their first use, so that `import mlxgen` (and `mlxgen -h`) doesn't wait for MLX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxgen.cache import CacheOptions
    from mlxgen.cancellation import NEVER, Cancelled, CancelToken, cancel_on_interrupt
    from mlxgen.compat import GenerationResponse, generate, stream_generate
    from mlxgen.constraints import Constraint, Grammar
    from mlxgen.decode import DecodeOptions, TokenIterator
    from mlxgen.engine import Engine
    from mlxgen.errors import (
        BannedStringError,
        ContextLengthError,
        GrammarError,
        InvalidValueError,
        MediaError,
        MlxgenError,
        ModelLoadError,
        NotResumableError,
        OutOfMemoryError,
        PlaceholderError,
        SessionBusyError,
        SnapshotError,
        SnapshotLockedError,
        StopConditionError,
        TemplateError,
        UnsupportedError,
    )
    from mlxgen.events import Event, Finished, InputProgress, PrefillProgress, Token, TopLogprob, Usage
    from mlxgen.inputs import MediaSpan, PreparedInput, PreparedMedium, VisionFamily, VisionModel
    from mlxgen.job import Job
    from mlxgen.models import LoadOptions, LoadProgress, Model, load
    from mlxgen.options import ReplyOptions, SessionOptions
    from mlxgen.persist import AutosavePolicy
    from mlxgen.prefixcache import PrefixCache, PrefixCacheInfo, PrefixCacheOptions, prefix_cache
    from mlxgen.preparation import PrepareRequest, prepare
    from mlxgen.request import ImagePart, MediaOptions, Message, VideoPart
    from mlxgen.resumption import ResumeOptions, resume
    from mlxgen.sampling import LogitsProcessor, SamplingParams
    from mlxgen.session import Session

_HOME = {
    "AutosavePolicy": "mlxgen.persist",
    "CacheOptions": "mlxgen.cache",
    "CancelToken": "mlxgen.cancellation",
    "Cancelled": "mlxgen.cancellation",
    "Constraint": "mlxgen.constraints",
    "ContextLengthError": "mlxgen.errors",
    "DecodeOptions": "mlxgen.decode",
    "Engine": "mlxgen.engine",
    "Event": "mlxgen.events",
    "Finished": "mlxgen.events",
    "GenerationResponse": "mlxgen.compat",
    "Grammar": "mlxgen.constraints",
    "GrammarError": "mlxgen.errors",
    "ImagePart": "mlxgen.request",
    "InputProgress": "mlxgen.events",
    "InvalidValueError": "mlxgen.errors",
    "Backtrack": "mlxgen.events",
    "BannedStringError": "mlxgen.errors",
    "Job": "mlxgen.job",
    "LoadOptions": "mlxgen.models",
    "LoadProgress": "mlxgen.models",
    "LogitsProcessor": "mlxgen.sampling",
    "MediaError": "mlxgen.errors",
    "MediaOptions": "mlxgen.request",
    "MediaSpan": "mlxgen.inputs",
    "Message": "mlxgen.request",
    "MlxgenError": "mlxgen.errors",
    "Model": "mlxgen.models",
    "ModelLoadError": "mlxgen.errors",
    "NEVER": "mlxgen.cancellation",
    "NotResumableError": "mlxgen.errors",
    "OutOfMemoryError": "mlxgen.errors",
    "PlaceholderError": "mlxgen.errors",
    "PrefillProgress": "mlxgen.events",
    "PrefixCache": "mlxgen.prefixcache",
    "PrefixCacheInfo": "mlxgen.prefixcache",
    "PrefixCacheOptions": "mlxgen.prefixcache",
    "PrepareRequest": "mlxgen.preparation",
    "PreparedInput": "mlxgen.inputs",
    "PreparedMedium": "mlxgen.inputs",
    "ReplyOptions": "mlxgen.options",
    "ResumeOptions": "mlxgen.resumption",
    "SamplingParams": "mlxgen.sampling",
    "Session": "mlxgen.session",
    "SessionBusyError": "mlxgen.errors",
    "SessionOptions": "mlxgen.options",
    "SnapshotError": "mlxgen.errors",
    "SnapshotLockedError": "mlxgen.errors",
    "TemplateError": "mlxgen.errors",
    "Token": "mlxgen.events",
    "TokenIterator": "mlxgen.decode",
    "TopLogprob": "mlxgen.events",
    "UnsupportedError": "mlxgen.errors",
    "Usage": "mlxgen.events",
    "VideoPart": "mlxgen.request",
    "VisionFamily": "mlxgen.inputs",
    "VisionModel": "mlxgen.inputs",
    "cancel_on_interrupt": "mlxgen.cancellation",
    "generate": "mlxgen.compat",
    "load": "mlxgen.models",
    "prefix_cache": "mlxgen.prefixcache",
    "prepare": "mlxgen.preparation",
    "resume": "mlxgen.resumption",
    "stream_generate": "mlxgen.compat",
}

__all__ = [
    "StopConditionError": "mlxgen.errors",
    "StopHit": "mlxgen.events",
    "NEVER",
    "AutosavePolicy",
    "CacheOptions",
    "ToolCall": "mlxgen.events",
    "CancelToken",
    "Cancelled",
    "Constraint",
    "ContextLengthError",
    "DecodeOptions",
    "Engine",
    "Event",
    "Finished",
    "GenerationResponse",
    "Grammar",
    "GrammarError",
    "ImagePart",
    "InputProgress",
    "InvalidValueError",
    "Job",
    "LoadOptions",
    "LoadProgress",
    "LogitsProcessor",
    "Backtrack",
    "BannedStringError",
    "MediaError",
    "MediaOptions",
    "MediaSpan",
    "Message",
    "MlxgenError",
    "Model",
    "ModelLoadError",
    "NotResumableError",
    "OutOfMemoryError",
    "PlaceholderError",
    "PrefillProgress",
    "PrefixCache",
    "PrefixCacheInfo",
    "PrefixCacheOptions",
    "PrepareRequest",
    "PreparedInput",
    "PreparedMedium",
    "ReplyOptions",
    "ResumeOptions",
    "SamplingParams",
    "Session",
    "SessionBusyError",
    "SessionOptions",
    "SnapshotError",
    "SnapshotLockedError",
    "TemplateError",
    "Token",
    "TokenIterator",
    "TopLogprob",
    "UnsupportedError",
    "Usage",
    "VideoPart",
    "VisionFamily",
    "VisionModel",
    "cancel_on_interrupt",
    "generate",
    "load",
    "prefix_cache",
    "prepare",
    "resume",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'mlxgen' has no attribute {name!r}")
    "StopConditionError",
    "StopHit",
    return getattr(import_module(home), name)


    "ToolCall",
def __dir__() -> list[str]:
    return sorted(__all__)
