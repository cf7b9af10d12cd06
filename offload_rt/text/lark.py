"""Grammars in llguidance's dialect of Lark, with JSON schemas within."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from offload_rt.text.schema_types import kinds_of

WHITESPACE = {"whitespace_pattern": r"[ ]{1,2}|\n{1,2}[ \t]{0,40}"}
"""How JSON may be laid out: no model can go on with blanks for ever."""

ANY = r"/(?s:.)*/"


class Lark:
    """Builds a grammar from expressions.

    Args:
        token: returns the token that a mark is; None: it is several.
    """

    def __init__(self, token: Callable[[str], int | None]) -> None:
        self._token = token
        self._rules: list[str] = []

    def source(self, start: str) -> str:
        """Returns the grammar that begins with an expression."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])

    def rule(self, body: str, options: str = "", *, terminal: bool = False) -> str:
        """Adds a rule; returns its name, which is an expression."""
        name = f"{'T' if terminal else 'rule_'}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def is_token(self, mark: str) -> bool:
        """Returns whether a mark is a token of its own."""
        return self._token(mark) is not None

    def mark(self, mark: str) -> str:
        """Returns a mark, as its token where it is one."""
        token = self._token(mark)
        return self.text(mark) if token is None else f"<[{token}]>"

    def text(self, text: str) -> str:
        """Returns a text as it is."""
        return json.dumps(text)

    def arguments(self, parameters: Mapping[str, Any]) -> str:
        """Returns the JSON objects that fit the parameters of a tool; where it has none, the empty one."""
        bare = not parameters.get("properties") and set(parameters) <= {"type", "properties"}
        return self.json({**parameters, "additionalProperties": False} if bare else parameters)

    def json(self, schema: Mapping[str, Any]) -> str:
        """Returns the texts of JSON values that fit a schema; see `WHITESPACE`."""
        return self.rule(f"%json {json.dumps({'x-guidance': WHITESPACE} | dict(schema))}")

    def any_of(self, alternatives: Iterable[str]) -> str:
        """Returns a choice of expressions."""
        return " | ".join(alternatives)

    def any_text(self, end: str = "", least: int = 0, most: int | None = None) -> str:
        """Returns any text that does not contain `end`, and `end` after it.

        Args:
            least, most: characters of the text; None: any number.
        """
        if not end:
            return self.rule(ANY)
        count = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
        if not self.is_token(end):
            return self.rule(f"/(?s:.){count}/", f"[suffix={self.text(end)}]")
        excluded = self.rule(f"{ANY} {self.text(end)} {ANY}", terminal=True)
        text = self.rule(f"/(?s:.){count}/ & ~{excluded}", terminal=True)
        return f"{self.rule(text)} {self.mark(end)}"

    def text_up_to(self, mark: str) -> str:
        """Returns any text up to the first time that a mark of several tokens occurs, and the mark."""
        text = self.rule(ANY, terminal=True)
        return self.rule(f"{text} {self.text(mark)}", "[lazy]")

    def value(self, schema: Any, root: Mapping[str, Any], end: str) -> str:
        """Returns a value of a schema up to a mark: strings as they are, all others in JSON.

        Of strings, enumerations and lengths are enforced, and no patterns or formats.

        Args:
            root: the schema whose definitions it refers to.
        """
        given = dict(schema) if isinstance(schema, Mapping) else {}
        words = given.get("enum", [given["const"]] if "const" in given else [])
        kinds = kinds_of(given, root)
        if words:
            texts = [
                word if isinstance(word, str) else json.dumps(word, ensure_ascii=False) for word in words
            ]
            return f"{self.rule(self.any_of(map(self.text, texts)))} {self.mark(end)}"
        if kinds and "string" not in kinds:
            shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"{self.json(shared | given)} {self.mark(end)}"
        return self.any_text(end, given.get("minLength", 0), given.get("maxLength"))

    def members(self, schema: Mapping[str, Any], member: Callable[[str, Any], str]) -> str:
        """Returns the properties of a schema in their order, those that are not required perhaps left out."""
        required = schema.get("required", ())
        parts = []
        for name, property_schema in schema.get("properties", {}).items():
            body = member(name, property_schema)
            parts.append(body if name in required else f"({body})?")
        return " ".join(parts)
