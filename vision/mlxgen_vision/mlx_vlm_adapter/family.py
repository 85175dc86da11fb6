"""The adapter as a family: it gets what no other family claims, and says what is coarser with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxgen.cancellation import NEVER, CancelToken
from mlxgen.errors import UnsupportedError
from mlxgen_vision.mlx_vlm_adapter import catalogue
from mlxgen_vision.mlx_vlm_adapter.bridge import load_bridge
from mlxgen_vision.mlx_vlm_adapter.model import MlxVlmModel
from mlxgen_vision.mlx_vlm_adapter.trial import try_out
from mlxgen_vision.support import FamilySupport

_log = logging.getLogger(__name__)


class MlxVlmFamily:
    """Satisfies `VisionFamily`. `fallback`: every other family comes first."""

    name = "mlx-vlm"
    fallback = True
    support = FamilySupport(
        models="What mlx-vlm has and mlxgen has no file for, through the optional adapter",
        prepares="one picture",
        encodes="one picture, the whole tower at once",
        layouts=("mlx",),
        note="nothing was compared with transformers: answers are mlx-vlm's; each model is tried out when it is loaded "
        "and refused where stopping and resuming would change them; pictures only",
    )

    @property
    def model_types(self) -> tuple[str, ...]:
        """What the installed mlx-vlm knows; () without it."""
        return catalogue.model_types()

    @property
    def advice(self) -> str:
        """What to say of the adapter where a model type is unknown."""
        version = catalogue.version()
        if version is None:
            return f"those of mlx-vlm can be used through an adapter: {catalogue.INSTALL}"
        return f"mlx-vlm {version}, through its adapter, doesn't know it either"

    @property
    def status(self) -> str:
        """One line for `mlxgen doctor`."""
        version = catalogue.version()
        if version is None:
            return f"not installed; {catalogue.INSTALL} adds its families, with coarser checkpoints"
        return (
            f"{version} has {len(catalogue.model_types())} model types with pictures; those without a family of "
            "mlxgen's own stop between pictures, not inside the tower, and aren't compared with transformers"
        )

    def load(self, path: Path, config: Mapping[str, Any], *, cancel: CancelToken = NEVER) -> MlxVlmModel:
        """See `VisionFamily.load`. Raises `UnsupportedError` for models that the trial refuses."""
        version = catalogue.version()
        if version is None:
            raise UnsupportedError(f"mlx-vlm isn't installed; {catalogue.INSTALL}")
        kind = str(config["model_type"])
        kind = catalogue.renamed().get(kind.lower(), kind.lower())
        notice = (
            f"{config['model_type']} runs through mlx-vlm {version}: stops between pictures, not inside the tower; "
            "answers are mlx-vlm's, not compared with transformers"
        )
        model = try_out(load_bridge(path, kind, cancel), notice, cancel)
        limit = model.manners.max_pictures
        if limit is not None:
            model.notice += f"; {limit} picture in a prompt"
        _log.warning("%s", model.notice)
        return model


FAMILY = MlxVlmFamily()
