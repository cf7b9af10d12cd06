"""The chat template of a multimodal checkpoint that stores it with its processor, not with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.utils.hub import cached_file

from offload_rt.errors import UsageError

FILES = ("chat_template.json", "processor_config.json")


def processor_template(source: str | Path) -> str | dict[str, str] | None:
    """Returns the chat template of a model's processor, or several by name; None: it has none.

    Raises:
        UsageError: a file that may hold it cannot be read.
    """
    for name in FILES:
        path = cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if path is None:
            continue
        try:
            values = json.loads(Path(path).read_text("utf-8"))
            template = values.get("chat_template")
            if isinstance(template, list):  # as tokenizer_config.json lists several
                template = {named["name"]: named["template"] for named in template}
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise UsageError(f"model {source}: its {name} cannot be read; download it again") from None
        if isinstance(template, str | dict) and template:
            return template
    return None
