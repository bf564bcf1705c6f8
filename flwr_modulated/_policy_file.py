"""A device's policy as a TOML file; `Policy.from_toml` documents the format."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from typing import Any

from .errors import InvalidParameterError
from .policy import Columns, Limits, Policy
from .privacy import Distance, Guarantee, Relation, Replace, ReplaceRecord

__all__ = ["read_policy"]


def read_policy(path: str | PathLike[str]) -> Policy:
    """The reader behind :meth:`Policy.from_toml`."""
    with open(path, "rb") as file:
        try:
            table = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidParameterError(f"the policy must be a TOML file: {error}") from None
    _check_keys("the policy", table, [item.name for item in fields(Policy)], required=["guarantee"])
    settings = dict(table)
    settings["guarantee"] = _guarantee_from(_table("guarantee", table["guarantee"]))
    for name, kind in (("columns", Columns), ("limits", Limits)):
        if name in table:
            entry = _table(name, table[name])
            required = ["centre", "scale"] if kind is Columns else []
            _check_keys(f"[{name}]", entry, [item.name for item in fields(kind)], required=required)
            settings[name] = kind(**entry)
    if "release_labels" not in table and not settings["guarantee"].relation.hides_labels:
        raise InvalidParameterError(
            f"release_labels must be said under the relation {settings['guarantee'].relation}: write "
            "release_labels = true if labels may leave the device as they are, or use replace_record"
        )
    return Policy(**settings)


def _guarantee_from(table: dict[str, Any]) -> Guarantee:
    kinds: dict[str, type[Relation]] = {
        "distance": Distance,
        "replace": Replace,
        "replace_record": ReplaceRecord,
    }
    own = [item.name for item in fields(Guarantee)]
    required = ["epsilon", "delta", "relation", "radius"]
    _check_keys("[guarantee]", table, [*own, "radius", "label_scale"], required=required)
    kind = kinds.get(table["relation"]) if isinstance(table["relation"], str) else None
    if kind is None:
        raise InvalidParameterError(f"relation must be one of {', '.join(kinds)}")
    if "label_scale" in table and kind is not ReplaceRecord:
        raise InvalidParameterError("label_scale in [guarantee] belongs to the relation replace_record only")
    relation = kind(**{name: table[name] for name in ("radius", "label_scale") if name in table})
    return Guarantee(**{name: table[name] for name in own if name in table} | {"relation": relation})


def _table(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidParameterError(f"{name} must be a table: write [{name}] on a line of its own")
    return value


def _check_keys(where: str, table: Mapping[str, Any], known: list[str], *, required: list[str]) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        raise InvalidParameterError(
            f"{where} has unknown key(s) {', '.join(unknown)}; known: {', '.join(known)}"
        )
    missing = [name for name in required if name not in table]
    if missing:
        raise InvalidParameterError(f"{where} must have the key(s) {', '.join(missing)}")
