"""A text that somebody takes token by token, and the newest one that has ended, which is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from offload_rt.engine import Engine
from offload_rt.results import GenerationResult, TokenEvent
from offload_rt.session import Session
from offload_rt.writer import Writer, step


class KeptText:
    """The newest text that has ended: it can be decoded again.

    Attributes:
        session: None: there is none.
        result: how it came about.
    """

    def __init__(self, engine: Engine) -> None:
        self.session: Session | None = None
        self.result: GenerationResult | None = None
        self._engine = engine
        self._dropped: deque[Writer] = deque()

    def end(self, writer: Writer) -> GenerationResult:
        """Ends a text, and keeps it unless a newer one has ended."""
        session = writer.session
        with self._engine.lock:
            try:
                self._engine.stop(session)  # the link would go on into a pass that nobody asks for
            finally:  # also where a second interrupt cuts that short
                newest, older = session, self.session
                if older is not None and older.opened > newest.opened:
                    newest, older = older, newest
                self.session = newest
                if older is not None and older is not newest:
                    self._engine.close_session(older)
                result = writer.result()
                if newest is session:
                    self.result = result
            return result

    def drop(self, writer: Writer) -> None:
        """Ends a text with the next call: this one may come from the garbage collector, in any thread, in
        the middle of anything, so it must neither lock nor wait."""
        self._dropped.append(writer)

    def end_dropped(self) -> None:
        """Ends the texts whose streams nobody holds any more."""
        while True:
            try:
                writer = self._dropped.popleft()
            except IndexError:  # none is left
                return
            self.end(writer)

    def give_back(self) -> None:
        """Gives the memory of the kept text back."""
        with self._engine.lock:
            session, self.session, self.result = self.session, None, None
            if session is not None:
                self._engine.close_session(session)


class TokenStream(Iterator[TokenEvent]):
    """A text as it is made: an iterator of its events. Closing it, or letting it go, ends the text.

    Attributes:
        result: how the text came about, once it has ended.
    """

    def __init__(self, engine: Engine, writer: Writer, kept: KeptText) -> None:
        self.result: GenerationResult | None = None
        self._engine = engine
        self._writer = writer
        self._kept = kept
        self._events: Iterator[TokenEvent] = iter(())

    def __next__(self) -> TokenEvent:
        try:
            while self.result is None:
                if (event := next(self._events, None)) is not None:
                    return event
                if self._writer.ended:
                    break
                self._kept.end_dropped()
                with self._engine.lock:
                    if self.result is None:  # no other thread has closed it
                        (self._events,) = step(self._engine, [self._writer])
        except BaseException:
            self.close()
            raise
        if self.result is None:
            self.close()
            if self._writer.error is not None:
                raise self._writer.error
        raise StopIteration

    def close(self) -> None:
        """Ends the text; what has been taken of it stands. Idempotent, from any thread."""
        with self._engine.lock:
            if self.result is None:
                self.result = self._kept.end(self._writer)

    def __del__(self) -> None:
        if self.result is None:
            self._kept.drop(self._writer)
