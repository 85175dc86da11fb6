"""LoRA adapters in mlx-lm's layout: checked, then applied by mlx-lm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from mlxgen.cancellation import CancelToken
from mlxgen.errors import ModelLoadError
from mlxgen.models.checkpoint import read_header
from mlxgen.models.config import read_json_object
from mlxgen.models.foreign import foreign_errors
from mlxgen.models.suggest import nearby_folder

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapters.safetensors"
_MAX_RANK: Final = 8192


def adapter_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of an adapter with both of its files in it; else `ModelLoadError`."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "doesn't exist"
        raise ModelLoadError(
            f"the adapter folder {folder} {kind}{nearby_folder(folder)}; give the folder that mlx_lm.lora wrote"
        )
    names = {child.name for child in folder.iterdir()}
    if "adapter_model.safetensors" in names:
        raise ModelLoadError(f"{folder} holds an adapter in PEFT's layout; mlx-lm's is needed (train with mlx_lm.lora)")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if name not in names:
            raise ModelLoadError(f"the adapter folder {folder} lacks {name}; give the folder that mlx_lm.lora wrote")
    return folder


def apply_adapter(module: Any, folder: Path, *, cancel: CancelToken) -> None:
    """Put the adapter's layers into `module`, in place. One checkpoint, before anything is changed."""
    config = read_json_object(folder / CONFIG_NAME)
    where = str(folder / CONFIG_NAME)
    if config.get("fine_tune_type", "lora") != "full":
        layers, parameters = config.get("num_layers"), config.get("lora_parameters")
        if not isinstance(layers, int) or isinstance(layers, bool):
            raise ModelLoadError(f"{where}: num_layers is {layers!r}; the number of adapted layers was expected")
        if not isinstance(parameters, dict):
            raise ModelLoadError(
                f"{where}: lora_parameters is {parameters!r}; an object with rank and scale was expected"
            )
        rank = parameters.get("rank")
        if not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK:
            raise ModelLoadError(f"{where}: rank is {rank!r}; a whole number from 1 to {_MAX_RANK} was expected")
    if not read_header(folder / WEIGHTS_NAME):
        raise ModelLoadError(f"{folder / WEIGHTS_NAME} holds no tensors; train the adapter again")
    cancel.checkpoint()
    from mlx_lm.utils import load_adapters

    with foreign_errors(f"the adapter {folder} doesn't fit the model"):
        load_adapters(module, str(folder))
        module.eval()
