"""Every error mlxgen raises on purpose. A message gives the value, the limit and the remedy, in one line.

`Cancelled` (in `cancellation.py`) is deliberately not among them: a requested stop is an outcome, not an error.
"""

from __future__ import annotations


class MlxgenError(Exception):
    """The root: `except MlxgenError` catches whatever mlxgen itself found wrong."""


class InvalidValueError(MlxgenError, ValueError):
    """An argument, a setting or a token id outside its limits. Nothing was run."""


class UnsupportedError(MlxgenError, ValueError):
    """A combination or a model that mlxgen doesn't do (it says what it does instead)."""


class ContextLengthError(MlxgenError, ValueError):
    """The prompt, or prompt and reply, don't fit the model's context."""


class TemplateError(MlxgenError, ValueError):
    """The model's chat template is missing, fails, or can't express the conversation."""


class MediaError(MlxgenError, ValueError):
    """A picture or video that can't be used: missing, damaged, too large, of an unknown kind."""


class PlaceholderError(MlxgenError, ValueError):
    """The number of placeholders in a prompt and the number of media differ."""


class ModelLoadError(MlxgenError, OSError):
    """A model that can't be found, downloaded or read."""


class OutOfMemoryError(MlxgenError, MemoryError):
    """The estimate says it won't fit this machine; nothing was allocated."""


class SnapshotError(MlxgenError, OSError):
    """A snapshot that can't be written, or is damaged, foreign or of a newer format."""


class SnapshotLockedError(SnapshotError):
    """Another process is using the snapshot."""


class SessionBusyError(MlxgenError, RuntimeError):
    """The session is in the middle of a reply that somebody else is still reading."""


class NotResumableError(MlxgenError, ValueError):
    """The run has something that can't be saved (a foreign sampler, a processor without `state`)."""


class GrammarError(MlxgenError, ValueError):
    """A grammar that is too complex, or that leaves no token to go on with. The session is where the last token left
    it; without the grammar, or with another one, it goes on."""


class StopConditionError(MlxgenError, RuntimeError):
    """A stop condition that fails or takes too long (a pattern, a callable). The session is where the last token left
    it; without that condition it goes on."""


class BannedStringError(MlxgenError, RuntimeError):
    """Banned strings that leave the model nothing to say. The session is where the last token left it; without them
    it goes on."""
