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
    from mlxgen.events import (
        Backtrack,
        Event,
        Finished,
        InputProgress,
        PrefillProgress,
        Section,
        SectionText,
        StopHit,
        Token,
        ToolCall,
        TopLogprob,
        Usage,
    )
    from mlxgen.history import Mark
    from mlxgen.inputs import MediaSpan, PreparedInput, PreparedMedium, VisionFamily, VisionModel
    from mlxgen.job import Job
    from mlxgen.models import LoadOptions, LoadProgress, Model, load
    from mlxgen.options import ReplyOptions, SessionOptions
    from mlxgen.persist import AutosavePolicy
    from mlxgen.positions import Score
    from mlxgen.prefixcache import PrefixCache, PrefixCacheInfo, PrefixCacheOptions, prefix_cache
    from mlxgen.preparation import PrepareRequest, prepare
    from mlxgen.request import ImagePart, MediaOptions, Message, VideoPart
    from mlxgen.resumption import ResumeOptions, resume
    from mlxgen.sampling import LogitsProcessor, SamplingParams
    from mlxgen.session import Session

_HOME = {
    "AutosavePolicy": "mlxgen.persist",
    "Backtrack": "mlxgen.events",
    "BannedStringError": "mlxgen.errors",
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
    "Job": "mlxgen.job",
    "LoadOptions": "mlxgen.models",
    "LoadProgress": "mlxgen.models",
    "LogitsProcessor": "mlxgen.sampling",
    "Mark": "mlxgen.history",
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
    "Score": "mlxgen.positions",
    "Section": "mlxgen.events",
    "SectionText": "mlxgen.events",
    "Session": "mlxgen.session",
    "SessionBusyError": "mlxgen.errors",
    "SessionOptions": "mlxgen.options",
    "SnapshotError": "mlxgen.errors",
    "SnapshotLockedError": "mlxgen.errors",
    "StopConditionError": "mlxgen.errors",
    "StopHit": "mlxgen.events",
    "TemplateError": "mlxgen.errors",
    "Token": "mlxgen.events",
    "TokenIterator": "mlxgen.decode",
    "ToolCall": "mlxgen.events",
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
    "NEVER",
    "AutosavePolicy",
    "Backtrack",
    "BannedStringError",
    "CacheOptions",
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
    "Mark",
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
    "Score",
    "Section",
    "SectionText",
    "Session",
    "SessionBusyError",
    "SessionOptions",
    "SnapshotError",
    "SnapshotLockedError",
    "StopConditionError",
    "StopHit",
    "TemplateError",
    "Token",
    "TokenIterator",
    "ToolCall",
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
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
