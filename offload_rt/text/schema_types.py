"""The types that a JSON schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
DEEPEST = 8
"""Steps through references and alternatives after which a schema may be anything."""


def kind_of(value: object) -> str:
    """Returns the type of a JSON value, by JSON schema's name."""
    return KINDS.get(type(value), "null")


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Returns the types that values of a schema may have; empty: any, or it cannot be told.

    Args:
        root: the schema whose definitions it refers to.
    """
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return set()
    if isinstance(named := schema.get("type"), str):
        return {named}
    if isinstance(named, list):
        return {kind for kind in named if isinstance(kind, str)}
    if "const" in schema:
        return {kind_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        return {kind_of(value) for value in values}
    for group in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(group), list):
            kinds = [kinds_of(one, root, depth + 1) for one in several]
            return set().union(*kinds) if all(kinds) else set()
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        found: Any = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return kinds_of(found, root, depth + 1)
    return set()


def admits(kinds: set[str], value: object) -> bool:
    """Returns whether a JSON value is of one of some types; of any where there are none."""
    kind = kind_of(value)
    return not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
