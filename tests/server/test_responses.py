"""OpenAI's responses, as the real `openai` client and plain HTTP see them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.serving import NAME, Served, saying, serving, steps_held_after
from support.tiny_models import real_text

from offload_rt import TokenEvent
from offload_rt.engine.engine import Engine
from offload_rt.server.protocols.errors import ApiError
from offload_rt.server.protocols.logprobs import TokensOfText
from offload_rt.server.protocols.responses import ResponseRequest, response_fields

BOOK = real_text()[:1000].encode("ascii", "replace").decode()
QUESTION = f"{BOOK}\n\nWho is Ahab?"
RESPONSES = "/v1/responses"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Nantucket"}}\n</tool_call>'
LETTERS: Any = {"format": {"type": "json_schema", "name": "letter", "schema": {"enum": ["a", "b"]}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def client(served: Served) -> Any:
    """A client that raises an error for an answer that is not as documented."""
    return served.client(_strict_response_validation=True)


def create(served: Served, **options: Any) -> Any:
    given: Any = {"model": NAME, "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    return client(served).responses.create(**given | options)


def events(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types and whose numbers count up."""
    _, text, headers = served.call(RESPONSES, {"input": "Hi", "stream": True, "max_output_tokens": 50} | body)
    assert headers["content-type"].startswith("text/event-stream")
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if "data" in lines:
            found.append(json.loads(lines["data"]))
            assert found[-1]["type"] == lines["event"]
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def output(response: Any) -> list[dict[str, Any]]:
    """The items of a response without what differs in every response."""
    items = response if isinstance(response, list) else [item.to_dict() for item in response.output]
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_an_answer_is_that_of_the_api_whole_and_streamed(served: Served) -> None:
    text = served.llm.chat([{"role": "user", "content": QUESTION}], max_tokens=12).text.lstrip()
    whole = create(served)
    assert (whole.output_text, whole.status, whole.object) == (text, "incomplete", "response")
    assert (whole.incomplete_details.reason, whole.output[0].status) == ("max_output_tokens", "incomplete")
    assert whole.usage.output_tokens == 12 and whole.usage.output_tokens_details.reasoning_tokens == 0
    again = create(served)
    assert again.usage.input_tokens_details.cached_tokens > len(BOOK)
    streamed = list(create(served, stream=True))
    deltas = [one.delta for one in streamed if one.type == "response.output_text.delta"]
    assert "".join(deltas) == text and len(deltas) > 1
    assert streamed[-1].type == "response.incomplete"
    assert output(streamed[-1].response) == output(whole)


def test_a_stream_has_an_event_for_everything_that_begins_and_ends(served: Served) -> None:
    with saying(f"<think>\nIt may rain.\n</think>\n\nI look.\n{CALL}"):
        found = events(served, tools=[WEATHER])
    names = [one["type"].removeprefix("response.") for one in found]
    repeated = [name for at, name in enumerate(names) if names[at - 1 : at] != [name]]
    assert repeated == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        *("output_item.done", "completed"),
    ]
    final = found[-1]["response"]
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert final["output"] == done and final["status"] == "completed"
    for number, item in enumerate(done):
        own = [one for one in found if one.get("item_id") == item["id"]]
        assert own and {one["output_index"] for one in own} == {number}
    assert output(done) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "It may rain.\n"}],
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "name": "weather",
            "arguments": '{"place": "Nantucket"}',
        },
    ]
    usage = final["usage"]
    assert 5 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize(
    "text",
    [
        "Call me Ishmael.",
        f"{CALL}",
        f"<think>Hm.</think>{CALL} {CALL} Both.",
        "<think>Hm.",
        "",
        f"a {CALL[:-9]}",
    ],
)
def test_a_streamed_response_accumulates_to_the_whole_one(served: Served, text: str) -> None:
    with saying(text):
        whole = create(served, tools=[WEATHER], max_output_tokens=200)
        with client(served).responses.stream(
            model=NAME, input=QUESTION, tools=[WEATHER], max_output_tokens=200, temperature=0
        ) as stream:
            seen = list(stream)
            final = stream.get_final_response()
    texts = [one.snapshot for one in seen if one.type == "response.output_text.delta"]
    assert (
        final.output_text
        == whole.output_text
        == "".join(one.delta for one in seen if one.type == "response.output_text.delta")
    )
    assert not texts or texts[-1] in final.output_text
    streamed = [item.to_dict() for item in final.output]
    for item in streamed:
        item.pop("parsed_arguments", None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    assert output(streamed) == output(whole)
    assert (final.status, final.usage.output_tokens) == (whole.status, whole.usage.output_tokens)


def test_a_call_that_ends_with_the_last_token_is_complete(served: Served) -> None:
    with saying(CALL + "x", pieces=len(CALL)):
        made = create(served, tools=[WEATHER], max_output_tokens=1)
    (call,) = made.output
    assert (made.status, call.type, call.status) == ("incomplete", "function_call", "completed")


def test_thoughts_as_a_summary_and_in_a_form_that_is_handed_back(served: Served) -> None:
    options: Any = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    with saying("<think>It may rain.</think>Yes."):
        whole = create(served, **options)
        found = events(served, **options)
    thoughts, answer = whole.output
    assert [part.text for part in thoughts.summary] == ["It may rain."] and thoughts.content is None
    assert found[-1]["response"]["reasoning"] == {"effort": None, "summary": "auto"}
    names = [one["type"].removeprefix("response.reasoning_summary_") for one in found]
    assert names[3] == "part.added" and names[4] == "text.delta"
    assert names.index("text.done") == names.index("part.done") - 1
    kept: list[dict[str, Any]] = [{"summary": []}, {"encrypted_content": None}]
    for form in kept:  # clients keep one or the other
        conversation = [QUESTION_ITEM, thoughts.to_dict() | form, answer.to_dict()]
        assert messages(conversation)[1] == {
            "role": "assistant",
            "content": [{"type": "text", "text": "Yes."}],
            "reasoning_content": "It may rain.",
        }
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABh" * 9}
    assert messages([QUESTION_ITEM, foreign]) == messages([QUESTION_ITEM])


def test_log_probabilities_are_those_of_the_tokens_of_the_text(served: Served) -> None:
    options: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = create(served, **options)
    (part,) = whole.output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text
    for one in part.logprobs:  # greedy: the token is the most likely one
        assert one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 2
        assert bytes(one.bytes).decode() == one.token
    deltas = [
        one for one in create(served, stream=True, **options) if one.type == "response.output_text.delta"
    ]
    streamed = [(entry.token, entry.logprob) for one in deltas for entry in one.logprobs]
    assert streamed == [(one.token, one.logprob) for one in part.logprobs]
    chat: Any = served.client().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=12,
        temperature=0,
        logprobs=True,
    )
    assert (
        streamed == [(one.token, one.logprob) for one in chat.choices[0].logprobs.content][-len(streamed) :]
    )


def test_tokens_of_a_part_are_those_that_wrote_it() -> None:
    tokens = TokensOfText()
    texts = ("<think>", "Hm", "</think>", "\n\n ", "", "\N{BULLET}", " B", "ye", "")
    for number, text in enumerate(texts):
        tokens.push(TokenEvent(number, text, False))
    taken = [[event.token for event in tokens.take(part)] for part in ("Hm", "\N{BULLET} B", "ye")]
    assert taken == [[1], [4, 5, 6], [7]], "the tokens of a character's bytes are with the character"


def test_an_answer_fits_a_schema(served: Served) -> None:
    made = create(served, text=LETTERS)
    assert made.output_text in ('"a"', '"b"') and made.status == "completed"
    assert made.completed_at >= made.created_at and made.text.format.to_dict()["schema"] == {
        "enum": ["a", "b"]
    }
    assert create(served, text={"format": {"type": "json_object"}}).output_text.startswith("{")


def test_a_response_says_what_was_asked_for(served: Served) -> None:
    asked: Any = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "moby",
        "service_tier": "auto",
        "temperature": 0.5,
        "tools": [WEATHER],
        "tool_choice": "none",
        "top_p": 0.9,
        "user": "me",
    }
    made = create(served, store=True, truncation="auto", **asked).to_dict()
    assert {name: made[name] for name in asked} == asked
    assert (made["store"], made["truncation"], made["previous_response_id"]) == (False, "disabled", None)
    assert (made["model"], made["object"], made["error"]) == (NAME, "response", None)


# -------------------------------------------------------------------------------- conversations

QUESTION_ITEM: Any = {"role": "user", "content": "Whither?"}


def chat(items: Any, **fields: Any) -> Any:
    """The request for a chat completion that one for a response is."""
    return ResponseRequest(input=items, **fields).chat()


def messages(items: Any, **fields: Any) -> list[Any]:
    found: list[Any] = chat(items, **fields).messages
    return found


def test_items_become_the_messages_of_a_chat() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"place": "Bali"}'}
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "dry"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Sure?"},
    ]
    function = {"name": "weather", "arguments": '{"place": "Bali"}'}

    def texts(*given: str) -> list[Any]:
        return [{"type": "text", "text": text} for text in given]

    assert messages(items, instructions="Be brief.") == [
        {"role": "system", "content": texts("Be brief.", "Be kind.")},
        {"role": "user", "content": texts("Rain?")},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": texts("I look."),
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": texts("dry")},
        {"role": "assistant", "content": texts("No.")},
        {"role": "user", "content": texts("Sure?")},
    ]


def test_thoughts_begin_a_message_of_their_own() -> None:
    def thoughts(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": text}]}

    answer = {"role": "assistant", "content": "I look."}
    found = messages([QUESTION_ITEM, thoughts("a"), thoughts("b"), answer, answer, thoughts("c"), answer])
    assert [message.get("reasoning_content") for message in found] == [None, "a\nb", "c"]
    assert [len(message["content"]) for message in found] == [1, 2, 1]


def test_an_answer_that_was_cut_is_continued(served: Served) -> None:
    question: Any = {"role": "user", "content": QUESTION}
    whole = create(served).output_text
    first = create(served, max_output_tokens=5)
    rest = create(served, input=[question, *first.output], max_output_tokens=7)
    assert first.output_text + rest.output_text == whole
    assert not chat([question, {"role": "assistant", "content": "Done.", "status": "completed"}]).continued


def test_what_a_response_holds_goes_back_with_the_outputs_of_its_calls(served: Served) -> None:
    conversation: list[Any] = [{"role": "user", "content": "Rain?"}]
    with saying(f"<think>Hm.</think>I look.{CALL}{CALL}"):
        made = create(served, input=conversation, tools=[WEATHER], max_output_tokens=200)
    calls = [item for item in made.output if item.type == "function_call"]
    assert len({call.call_id for call in calls}) == 2
    conversation += made.output
    conversation += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "dry"} for call in calls
    ]
    with saying("It is dry."):
        again = create(served, input=conversation, tools=[WEATHER], max_output_tokens=200)
    assert again.output_text == "It is dry."
    assert again.usage.input_tokens_details.cached_tokens > len("[user]Rain?")


def test_a_required_call_has_arguments_that_fit(served: Served) -> None:
    place: Any = {
        "type": "object",
        "properties": {"place": {"enum": ["Bali", "Oahu"]}},
        "required": ["place"],
    }
    tools = [WEATHER | {"parameters": place | {"additionalProperties": False}}]
    choices: list[Any] = ["required", {"type": "function", "name": "weather"}]
    for choice in choices:
        options: Any = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
        made = create(served, max_output_tokens=200, temperature=1, extra_body={"seed": 1}, **options)
        (call,) = made.output
        assert (call.type, call.name, made.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments)["place"] in ("Bali", "Oahu")
    text = create(served, tools=tools, tool_choice="none").output
    assert [item.type for item in text] == ["message"]


PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"hi"\n*** End Patch\n'
APPLY_PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk end_patch"},
}


def test_a_custom_tool_takes_a_text(served: Served) -> None:
    arguments = json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}})
    with saying(f"<tool_call>\n{arguments}\n</tool_call>"):
        made = create(served, tools=[APPLY_PATCH], max_output_tokens=200)
        found = events(served, tools=[APPLY_PATCH], max_output_tokens=200)
    (call,) = made.output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    deltas = [one["delta"] for one in found if one["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    done = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Success."}
    assistant, tool = messages([QUESTION_ITEM, call.to_dict(), done])[1:]
    function = assistant["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("apply_patch", {"input": PATCH})
    assert tool["tool_call_id"] == call.call_id
    (seen,) = chat("Hi", tools=[APPLY_PATCH]).tools
    assert "hunk end_patch" in seen["function"]["description"]


def test_tools_of_a_namespace_are_called_by_their_own_names(served: Served) -> None:
    tools: Any = [
        {"type": "namespace", "name": "mcp__sea", "description": "The sea.", "tools": [WEATHER]},
        {"type": "namespace", "name": "functions", "description": "", "tools": [APPLY_PATCH]},
    ]
    request = chat("Hi", tools=tools, tool_choice={**WEATHER, "namespace": "mcp__sea"})
    assert [tool["function"]["name"] for tool in request.tools] == ["mcp__sea__weather", "apply_patch"]
    assert request.tools[0]["function"]["description"] == "The weather of a place.\n\nThe sea."
    assert request.tool_choice == {"type": "function", "function": {"name": "mcp__sea__weather"}}
    with saying(CALL.replace('"weather"', '"mcp__sea__weather"')):
        (call,) = create(served, tools=tools, max_output_tokens=200).output
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "mcp__sea")
    (answer,) = messages([call.to_dict()])
    assert answer["tool_calls"][0]["function"]["name"] == "mcp__sea__weather"


def test_allowed_tools_are_those_that_the_model_sees() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "apply_patch"}],
    }
    request = chat("Hi", tools=[WEATHER, APPLY_PATCH], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in request.tools] == ["apply_patch"]
    assert request.tool_choice == "required"


# -------------------------------------------------------------------------------------- refusals

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "Field required"),
    ({"input": []}, "input", "input is empty"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation in input"),
    ({"conversation": "conv_1"}, "conversation", "stores no responses"),
    ({"background": True}, "background", "background is not supported"),
    ({"max_tokens": 5}, "max_tokens", "unknown parameter max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ({"temperature": "hot"}, "temperature", "temperature"),
    ({"reasoning": {"effort": "huge"}}, "reasoning", "reasoning.effort: Input should be 'none'"),
    ({"text": {"verbosity": "high"}}, "text.verbosity", "text.verbosity 'high' is not supported"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "give a JSON schema"),
    ({"top_logprobs": 2}, "top_logprobs", "add 'message.output_text.logprobs' to include"),
    ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type", "tools[1] of type 'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "tools[0].name is None: give a text"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0].tools", "give a list"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "is given twice"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", "of type 'mcp' is not supported"),
    ({"input": [1]}, "input[0]", "input[0] is 1: give an object"),
    ({"input": [{"type": []}]}, "input[0].type", "input[0] of type [] is not supported"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "use message, reasoning"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "input[0].role is 'tool'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "input[0].content is None"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "input[0].content[0] of type 'input_image' is not supported: the model reads only text",
    ),
    (
        {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]},
        "input[0].call_id",
        "give a text",
    ),
    ({"input": 9 * BOOK}, "input", "more than the 8192 positions"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_refusals_name_the_field(served: Served, fields: Any, param: str, message: str) -> None:
    for stream in (False, True):
        body = {"model": NAME, "input": "Hi", "stream": stream} | fields
        with pytest.raises(openai.BadRequestError) as refused:
            served.client().post(RESPONSES.removeprefix("/v1"), body=body, cast_to=object)
        assert (refused.value.param, message in refused.value.message) == (param, True), refused.value
    assert not served.worker.running


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.sampled_from(["", "x", "auto", "function", "message"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name"]), inner),
    max_leaves=4,
)
BODY: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "x", "namespace": "y", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "x", "input": "x"},
        {"type": "message", "role": "assistant", "content": "x", "status": "incomplete"},
    ],
    "tools": [{"type": "namespace", "name": "n", "description": "x", "tools": [WEATHER]}, APPLY_PATCH],
    "tool_choice": {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    },
    "text": LETTERS,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 1,
}


@given(data=st.data())
def test_whatever_a_field_is_it_is_taken_or_refused_by_name(data: st.DataObject) -> None:
    body: Any = copy.deepcopy(BODY)
    at = body
    while True:  # replaces a value anywhere in it
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    try:
        request = ResponseRequest.model_validate(response_fields(body))
    except (ApiError, ValidationError):
        return
    try:
        chat_request = request.chat()
        assert chat_request.messages and chat_request.settings is not None
    except ApiError as error:
        assert error.status == 400 and error.param and str(error)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_a_failed_response(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    def fail(engine: Engine, sequences: Any) -> Any:
        raise RuntimeError("device lost")

    with serving(layers=1) as served:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", fail)
            if stream:
                *_, last = create(served, stream=True)
                assert (last.type, last.response.status) == ("response.failed", "failed")
                error = last.response.error
                assert (error.code, error.message) == ("server_error", "the engine failed: device lost")
            else:
                with pytest.raises(openai.InternalServerError, match="device lost"):
                    create(served)
        served.idle()
        assert create(served).output_text


def test_a_client_that_goes_away_frees_its_turn() -> None:
    with serving(parallel=1, layers=1) as served:
        for stream in (True, False):
            connection = served.connect()
            body = json.dumps({"input": "Go on.", "max_output_tokens": 4000, "stream": stream})
            connection.request("POST", RESPONSES, body, {"content-type": "application/json"})
            if stream:
                connection.getresponse().readline()
            served.wait_until(lambda: served.worker.running == 1)
            connection.close()
            assert create(served).usage.output_tokens == 12
            served.idle()
        assert served.metrics.generated_tokens < 4000


def test_a_stream_begins_before_its_turn_and_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.server.answering.KEEP_ALIVE_S", 0.01)
    with serving(parallel=1, layers=1) as served, steps_held_after(monkeypatch, 0):
        for _ in range(2):
            stream = create(served, stream=True)
            found = [next(stream) for _ in range(4)]
            assert [one.type for one in found] == ["response.created"] + 3 * ["response.in_progress"]
            assert [one.sequence_number for one in found] == [0, 1, 2, 3]
            stream.close()
