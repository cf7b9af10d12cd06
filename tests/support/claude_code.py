"""Requests as Claude Code sends them, shortened: a tiny model reads each character as a token."""

from __future__ import annotations

from typing import Any

EPHEMERAL = {"type": "ephemeral"}
TOOLS = {
    "Task": {"description": "string", "prompt": "string", "subagent_type": "string"},
    "TaskOutput": {"task_id": "string", "block": "boolean", "timeout": "number"},
    "Bash": {"command": "string", "timeout": "number", "run_in_background": "boolean"},
    "Glob": {"pattern": "string", "path": "string"},
    "Grep": {"pattern": "string", "-A": "number", "multiline": "boolean"},
    "ExitPlanMode": {},
    "Read": {"file_path": "string", "offset": "number", "limit": "number"},
    "Edit": {"file_path": "string", "old_string": "string", "new_string": "string"},
    "Write": {"file_path": "string", "content": "string"},
    "NotebookEdit": {"notebook_path": "string", "new_source": "string"},
    "WebFetch": {"url": "string", "prompt": "string"},
    "TodoWrite": {"todos": "array"},
    "WebSearch": {"query": "string", "allowed_domains": "array"},
    "TaskStop": {"task_id": "string"},
    "AskUserQuestion": {"questions": "array", "answers": "object"},
    "Skill": {"skill": "string", "args": "string"},
    "EnterPlanMode": {},
    "ListMcpResourcesTool": {"server": "string"},
    "ReadMcpResourceTool": {"server": "string", "uri": "string"},
    "mcp__ide__getDiagnostics": {"uri": "string"},
}
"""Names of tools, and the types of their arguments."""


def reminder(text: str) -> dict[str, Any]:
    return {"type": "text", "text": f"<system-reminder>\n{text}\n</system-reminder>\n"}


def question(*turns: Any, bill: str = "fa690") -> dict[str, Any]:
    """The body of the request for the next answer of a session.

    Args:
        turns: messages after the user's first one.
        bill: what differs in every request.
    """
    billing = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={bill};"
    identity = "You are Claude Code, Anthropic's official CLI for Claude."
    instructions = "You are an interactive CLI tool that helps users with software engineering tasks."
    asked = {"type": "text", "text": "read a.txt", "cache_control": EPHEMERAL}
    first = {"role": "user", "content": [reminder("As you answer, use this context."), asked]}
    return {
        "model": "claude-sonnet-4-5-20250929",
        "messages": [first, *turns],
        "system": [
            {"type": "text", "text": billing},
            {"type": "text", "text": identity, "cache_control": EPHEMERAL},
            {"type": "text", "text": instructions, "cache_control": EPHEMERAL},
        ],
        "tools": [_tool(name, arguments) for name, arguments in TOOLS.items()],
        "metadata": {"user_id": "user_1f0c_account__session_4c1e7b57-7a0f-4e0e-9d35-5ab1c7b5f0d5"},
        "max_tokens": 32000,
        "thinking": {"budget_tokens": 31999, "type": "enabled"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def results(*contents: Any, calls: Any) -> list[dict[str, Any]]:
    """The turns that hand back the results of calls, with what Claude Code reminds the model of."""
    blocks = [
        {"tool_use_id": call["id"], "type": "tool_result", "content": content}
        for call, content in zip(calls, contents, strict=True)
    ]
    blocks[-1]["is_error"] = True
    blocks[-1]["cache_control"] = EPHEMERAL
    turn = {"role": "user", "content": [*blocks, reminder("The TodoWrite tool hasn't been used recently.")]}
    return [turn, {"role": "system", "content": [{"type": "text", "text": "The date has changed."}]}]


def _tool(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "description": f"{name}.",
        "input_schema": {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "object",
            "properties": {argument: {"type": kind} for argument, kind in arguments.items()},
            "required": list(arguments)[:1],
            "additionalProperties": False,
        },
    }
