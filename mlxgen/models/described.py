"""What the installed vision families say of themselves: the source of `mlxgen families` and of docs/families.md.

A family may have an attribute `support`: a mapping, or an object with attributes, of the names of `Description` from
`models` on. All of them may be left out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mlxgen.models.families import InstalledFamily, installed_families, vision_families

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compared:
    """One checkpoint on which the family was compared with its reference: which cases, in which layouts."""

    checkpoint: str
    cases: tuple[str, ...]
    layouts: tuple[str, ...]
    quantized: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """One family. `model_types` are those it really gets here: none that another family has before it.

    `prepares` and `encodes` say what lies between two checkpoints in each phase; "" where the family doesn't say.
    `video` is None where it doesn't say. `parity` is empty where nothing was compared.
    """

    name: str
    package: str
    model_types: tuple[str, ...]
    fallback: bool
    models: str
    prepares: str
    encodes: str
    video: bool | None
    layouts: tuple[str, ...]
    parity: tuple[Compared, ...]
    note: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_families() -> tuple[Description, ...]:
    """All installed families by name, fallbacks last. A `support` that isn't one is passed over with a warning."""
    described = [_describe(installed) for installed in installed_families()]
    return tuple(sorted(described, key=lambda one: (one.fallback, one.name)))


def _describe(installed: InstalledFamily) -> Description:
    family = installed.family
    support = getattr(family, "support", None)
    try:
        return _read(installed, {} if support is None else support)
    except (TypeError, ValueError) as error:
        _log.warning("vision family %r (%s): its support can't be read: %s", family.name, installed.package, error)
        return _read(installed, {})


def _read(installed: InstalledFamily, support: Any) -> Description:
    video = _value(support, "video", None)
    if video is not None and not isinstance(video, bool):
        raise TypeError(f"video is {video!r}, not true or false")
    return Description(
        name=installed.family.name,
        package=installed.package,
        model_types=tuple(kind for kind in installed.model_types if vision_families().get(kind) is installed.family),
        fallback=installed.fallback,
        models=_text(support, "models"),
        prepares=_text(support, "prepares"),
        encodes=_text(support, "encodes"),
        video=video,
        layouts=_words(support, "layouts"),
        parity=tuple(
            Compared(_text(one, "checkpoint"), _words(one, "cases"), _words(one, "layouts"), _words(one, "quantized"))
            for one in _value(support, "parity", ())
        ),
        note=_text(support, "note"),
    )


def _value(support: Any, name: str, default: Any) -> Any:
    return support.get(name, default) if isinstance(support, Mapping) else getattr(support, name, default)


def _text(support: Any, name: str) -> str:
    value = _value(support, name, "")
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not a text")
    return value


def _words(support: Any, name: str) -> tuple[str, ...]:
    value = _value(support, name, ())
    if isinstance(value, str) or not all(isinstance(word, str) for word in value):
        raise TypeError(f"{name} is {value!r}, not a series of texts")
    return tuple(value)
