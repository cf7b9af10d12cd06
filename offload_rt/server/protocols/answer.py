"""The answer to a request, as a protocol writes it: one object, or the messages of a stream."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from offload_rt.engine.results import PromptScore, TokenEvent
from offload_rt.server.jobs.worker import Event, Finished, PromptProgress, Queued
from offload_rt.server.protocols.errors import error_json

Json = dict[str, Any]
SEAL = "offload-rt thoughts: "
"""What thoughts begin with that a client hands back without showing them."""


def sealed(thoughts: str) -> str:
    """Returns thoughts for a client to hand back: as they are, as no one but the user holds them."""
    return SEAL + thoughts


def unsealed(value: object) -> str:
    """Returns the thoughts of a `sealed` text; none of what other services have sealed."""
    return value.removeprefix(SEAL) if isinstance(value, str) and value.startswith(SEAL) else ""


class Message(NamedTuple):
    """A server-sent event.

    Attributes:
        name: its type; None: it has none.
    """

    data: Json | str
    name: str | None = None

    @property
    def line(self) -> str:
        """The text that is sent."""
        data = self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        return ("" if self.name is None else f"event: {self.name}\n") + f"data: {data}\n\n"


class Answer(ABC):
    """Turns the events of a request into the objects of one protocol; keeps what the whole answer needs.

    Args:
        choices: number of choices, each of which a job generates.

    Attributes:
        finished: the ends of the choices so far, by their numbers.
    """

    def __init__(self, choices: int = 1) -> None:
        self._choices = choices
        self.finished: dict[int, Finished] = {}

    @property
    def ended(self) -> bool:
        """Whether all choices have ended."""
        return len(self.finished) == self._choices

    @property
    def waiting(self) -> str:
        """The text that a stream sends at once, and where it has had nothing to send for a while."""
        return ": waiting\n\n"

    def take(self, choice: int, event: Event) -> list[Message]:
        """Returns the messages of an event of a choice. Raises the exception that an event is."""
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Queued | PromptProgress):
            return self.progress(choice, event)
        if isinstance(event, PromptScore):
            return self.scored(choice, event)
        if isinstance(event, TokenEvent):
            return self.token(choice, event)
        self.finished[choice] = event
        return self.finish(choice, event)

    def begin(self) -> Sequence[Message]:
        """Returns the messages that a stream begins with, before the request has had its turn."""
        return ()

    def progress(self, choice: int, event: Queued | PromptProgress) -> list[Message]:
        """Returns the messages of a place in the queue, or of a prompt that is being read."""
        return []

    def scored(self, choice: int, score: PromptScore) -> list[Message]:
        """Returns the messages of the prompt's log probabilities, which come before the first token."""
        return []

    @abstractmethod
    def token(self, choice: int, event: TokenEvent) -> list[Message]:
        """Returns the messages of a token."""

    @abstractmethod
    def finish(self, choice: int, finished: Finished) -> list[Message]:
        """Returns the last messages of a choice."""

    def end(self) -> Sequence[Message]:
        """Returns the messages behind those of all choices."""
        return ()

    def failed(self, status: int, message: str, code: str, param: str | None) -> Message:
        """Returns the message of an error, with which a stream ends; see `error_json`."""
        return Message(error_json(status, message, code, param))

    @abstractmethod
    def whole(self) -> Json:
        """Returns the whole answer, once it has ended."""
