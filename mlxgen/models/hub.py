"""Models from the Hugging Face Hub: into the hub's own cache, stoppable at any block, and resumed from there.

huggingface_hub keeps no partial files (2.4 removes them when a download fails), and its blocks are 10 MB. So large
files are streamed here, by Range requests into `blobs/<hash>.mlxgen.incomplete`, verified against the hub's SHA-256,
and only then put in place; huggingface_hub does the rest (metadata, small files, links), so that the cache stays the
one that all other programs use.
"""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import huggingface_hub
from huggingface_hub import constants, errors

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import MlxgenError, ModelLoadError
from mlxgen.models.background import call_in_background
from mlxgen.models.checkpoint import weight_files
from mlxgen.models.download import BlobDownload, download_blob, require_disk_space
from mlxgen.models.suggest import closest

_log = logging.getLogger(__name__)

# What a model needs; code is fetched only for callers who asked for it.
_PATTERNS: Final = (
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
_CODE_PATTERNS: Final = ("*.py",)
# Smaller files go through huggingface_hub in one piece.
_STREAMED_FROM_BYTES: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a phase of loading is. `done` and `total` are bytes; `name` is the file or model it is about."""

    phase: str  # "download" | "convert" | "read"
    done: int
    total: int
    name: str


OnProgress = Callable[[LoadProgress], None]


@dataclass(frozen=True, slots=True)
class HubRequest:
    """Which model: `repo` as `owner/name`, `revision` a branch, tag or commit (None: the default branch)."""

    repo: str
    revision: str | None = None
    offline: bool = False
    code: bool = False

    @property
    def patterns(self) -> tuple[str, ...]:
        return _PATTERNS + (_CODE_PATTERNS if self.code else ())


def fetch(request: HubRequest, *, on_progress: OnProgress | None = None, cancel: CancelToken = NEVER) -> Path:
    """The folder of the model in the hub's cache, with what is missing downloaded.

    Without network (`offline`, `HF_HUB_OFFLINE`, no connection) a complete cached copy is used as it is. A stop keeps
    partial files, and the next call goes on from them. Raises `ModelLoadError` (no such model, gated, no network, disk
    full, damaged in transit) and `Cancelled`.
    """
    try:
        if request.offline or constants.HF_HUB_OFFLINE:
            return _cached(request)
        return _fetch_online(request, on_progress, cancel)
    except MlxgenError:
        raise
    except errors.HFValidationError as error:
        raise ModelLoadError(
            f"{request.repo!r} is neither a folder nor a name on the hub (owner/name){_suggest(request.repo)}"
        ) from error
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, errors.RevisionResolutionError) as error:
        raise _explain(request, error) from error
    except OSError as error:
        raise _explain_os_error(request, error) from error
    except Exception as error:  # the HTTP client's own errors are no OSErrors
        raise ModelLoadError(
            f"can't reach the hub for {request.repo!r} ({type(error).__name__}: {error}); check the network, or "
            "give the path of a folder"
        ) from error


def _fetch_online(request: HubRequest, on_progress: OnProgress | None, cancel: CancelToken) -> Path:
    # One question without huggingface_hub's retries (it would try for 20 s): is there a hub, and the model on it?
    url = huggingface_hub.hf_hub_url(request.repo, "config.json", revision=request.revision)
    try:
        call_in_background(lambda: huggingface_hub.get_hf_file_metadata(url), cancel=cancel)
    except Exception as error:
        if (cached := _cached_or_none(request)) is None:
            raise
        _log.warning("the hub doesn't answer for %s (%s); using the cached copy %s", request.repo, error, cached)
        return cached
    # The first file by branch name: it tells the commit, and huggingface_hub notes which commit the branch stood at.
    config = call_in_background(lambda: _hub_file(request.repo, "config.json", request.revision), cancel=cancel)
    folder = Path(config).parent
    commit = folder.name
    info = call_in_background(
        lambda: huggingface_hub.HfApi().model_info(request.repo, revision=commit, files_metadata=True), cancel=cancel
    )
    wanted = [
        file
        for file in info.siblings or ()
        if any(fnmatch.fnmatch(file.rfilename, pattern) for pattern in request.patterns) and "/" not in file.rfilename
    ]
    missing = [file for file in wanted if not (folder / file.rfilename).exists()]
    if missing:
        _download(request.repo, folder, missing, on_progress, cancel)
    return folder


class _SilentProgress(huggingface_hub.utils.tqdm):  # type: ignore[misc, name-defined]
    """huggingface_hub would draw bars on the terminal; a library must not."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "disable": True})


def _hub_file(repo: str, name: str, revision: str | None) -> str:
    return huggingface_hub.hf_hub_download(repo, name, revision=revision, tqdm_class=_SilentProgress)


def _download(repo: str, folder: Path, files: list[Any], on_progress: OnProgress | None, cancel: CancelToken) -> None:
    sizes = {file.rfilename: int(file.size or 0) for file in files}
    total = sum(sizes.values())
    blobs = folder.parent.parent / "blobs"
    before = 0
    require_disk_space(blobs, total - sum(path.stat().st_size for path in blobs.glob("*.mlxgen.incomplete")), repo)
    for file in sorted(files, key=lambda file: sizes[file.rfilename]):
        name = file.rfilename

        def report(done: int, name: str = name, before: int = before) -> None:
            if on_progress is not None:
                on_progress(LoadProgress("download", before + done, total, name))

        report(0)
        size = sizes[name]
        if file.lfs is not None and _STREAMED_FROM_BYTES <= size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            blob = BlobDownload(
                url=huggingface_hub.hf_hub_url(repo, name, revision=folder.name),
                sha256=file.lfs.sha256,
                size_bytes=size,
                target=blobs / file.lfs.sha256,
                lock=blobs.parent.parent / ".locks" / blobs.parent.name / f"{file.lfs.sha256}.lock",
            )
            download_blob(blob, on_progress=report, cancel=cancel)
        # Makes the link (and downloads what wasn't streamed above).
        call_in_background(lambda name=name: _hub_file(repo, name, folder.name), cancel=cancel)  # type: ignore[misc]
        before += size
    if on_progress is not None:
        on_progress(LoadProgress("download", total, total, repo))


def _cached(request: HubRequest) -> Path:
    folder = _cached_or_none(request)
    if folder is None:
        raise ModelLoadError(
            f"{request.repo!r} isn't (completely) in the hub's cache {constants.HF_HUB_CACHE} and downloads are off"
            f"{_suggest(request.repo)}; load it once with network, or unset HF_HUB_OFFLINE"
        )
    return folder


def _cached_or_none(request: HubRequest) -> Path | None:
    config = huggingface_hub.try_to_load_from_cache(request.repo, "config.json", revision=request.revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    return folder if _complete(folder) else None


def _complete(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ModelLoadError:
        return False


def _explain(request: HubRequest, error: Exception) -> ModelLoadError:
    repo, page = request.repo, f"{constants.ENDPOINT}/{request.repo}"
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{repo!r} is gated: ask for access at {page}, then log in with `hf auth login` (or set HF_TOKEN)"
        )
    if isinstance(error, errors.RevisionNotFoundError | errors.RevisionResolutionError):
        return ModelLoadError(f"{repo!r} has no revision {request.revision!r}; see {page}/commits")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status == 401:
        return ModelLoadError(
            f"the hub has no model {repo!r} (or it is private){_suggest(repo)}; check the name, and log in with "
            "`hf auth login` if it is private"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ModelLoadError(
            f"{repo!r} has no config.json, so it isn't a model in the Hugging Face layout (a GGUF or adapter "
            f"repository?); see {page}"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelLoadError(
            f"can't reach the hub at {constants.ENDPOINT} for {repo!r}{_suggest(repo)}, and it isn't in the cache; "
            "check the network, or give the path of a folder"
        )
    return ModelLoadError(f"the hub answered {status} for {repo!r} ({_first_line(error)}); try again later")


def _explain_os_error(request: HubRequest, error: OSError) -> ModelLoadError:
    if error.errno is not None:
        return ModelLoadError(
            f"can't store {request.repo!r} in {constants.HF_HUB_CACHE}: {error.strerror}; free some space, or set "
            "HF_HUB_CACHE to another folder (what was downloaded is kept)"
        )
    return ModelLoadError(f"can't download {request.repo!r} ({_first_line(error)}); try again")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def cached_repos() -> list[str]:
    """Names of the models in the hub's cache, sorted."""
    try:
        names = [entry.name for entry in os.scandir(constants.HF_HUB_CACHE) if entry.name.startswith("models--")]
    except OSError:
        return []
    return sorted(name.removeprefix("models--").replace("--", "/") for name in names)


def _suggest(name: str) -> str:
    return closest(name, [*cached_repos(), "smollm2"])
