"""Spans for OpenTelemetry: what a request waited for, in whose name, in which thread.

::

    the caller's span
    ├── hicache.match            asks L3, votes, locks
    │   ├── hicache.exists       one store's answer (of each store of a stack)
    │   └── hicache.fetch        L3 -> L2, one ticket; begun by the match, ends when it has arrived
    │       └── hicache.get      one store's call
    ├── hicache.load             the restore, with whatever it had to wait for
    │   └── hicache.copy         L2 -> L1, one ticket
    └── hicache.copy, hicache.store        what a release sent down; they outlive it
        └── hicache.put

``OFF`` does nothing and imports nothing; it stands wherever tracing was not asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from hicache.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context

PREFIX = "hicache"


class Span(Protocol):
    """One piece of work."""

    def note(self, **facts: str | int) -> None:
        """Attributes, named ``hicache.<fact>``."""

    def end(self, error: str | None = None) -> None:
        """It is over; ``error`` says in a word why it fell short."""


class Tracing(Protocol):
    """Makes spans. *Thread*: any."""

    def begin(self, name: str, /, **facts: str | int) -> Span:
        """A span under the one that is current here. The caller ends it, from any thread."""
        ...

    def span(
        self, name: str, /, *, beside: Span | None = None, **facts: str | int
    ) -> AbstractContextManager[Span]:
        """A span that is current inside the block.

        Args:
            beside: where nothing is current here, it hangs under what that span hangs under.
        """
        ...

    def inside(self, span: Span) -> AbstractContextManager[None]:
        """Have a span current in the block, in whatever thread this is."""
        ...


class _NoSpan:
    __slots__ = ()

    def note(self, **facts: str | int) -> None: ...

    def end(self, error: str | None = None) -> None: ...


class _Off:
    """Nothing is traced."""

    def __init__(self) -> None:
        self._block = contextlib.nullcontext[Span](NO_SPAN)
        self._inside = contextlib.nullcontext[None]()

    def begin(self, name: str, /, **facts: str | int) -> Span:
        return NO_SPAN

    def span(
        self, name: str, /, *, beside: Span | None = None, **facts: str | int
    ) -> AbstractContextManager[Span]:
        return self._block

    def inside(self, span: Span) -> AbstractContextManager[None]:
        return self._inside


NO_SPAN: Span = _NoSpan()
OFF: Tracing = _Off()


class _OtelSpan:
    """A span of OpenTelemetry's, with the context in which it began."""

    def __init__(self, span: trace.Span, origin: Context) -> None:
        self.span = span
        self.origin = origin

    def note(self, **facts: str | int) -> None:
        self.span.set_attributes({f"{PREFIX}.{name}": fact for name, fact in facts.items()})

    def end(self, error: str | None = None) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end()


class OtelTracing:
    """Spans from the process's tracer provider, which the application sets up."""

    def __init__(self, version: str) -> None:
        try:
            from opentelemetry import context, trace
        except ImportError as error:
            raise ConfigError(
                ["tracing.enabled: needs the package opentelemetry-api; pip install 'hicache[otel]'"]
            ) from error
        self._trace, self._context = trace, context
        self._tracer = trace.get_tracer(PREFIX, version)

    def begin(self, name: str, /, **facts: str | int) -> Span:
        return self._begin(name, self._context.get_current(), facts)

    def _begin(self, name: str, origin: Context, facts: dict[str, str | int]) -> _OtelSpan:
        attributes = {f"{PREFIX}.{fact}": value for fact, value in facts.items()}
        return _OtelSpan(self._tracer.start_span(name, origin, attributes=attributes), origin)

    @contextlib.contextmanager
    def span(self, name: str, /, *, beside: Span | None = None, **facts: str | int) -> Iterator[Span]:
        origin = self._context.get_current()
        is_alone = not self._trace.get_current_span(origin).get_span_context().is_valid
        if is_alone and isinstance(beside, _OtelSpan):
            origin = beside.origin
        begun = self._begin(name, origin, facts)
        try:
            with self.inside(begun):
                yield begun
        except BaseException as error:
            begun.end(type(error).__name__)  # its text may name what spans should not
            raise
        begun.end()

    @contextlib.contextmanager
    def inside(self, span: Span) -> Iterator[None]:
        if not isinstance(span, _OtelSpan):
            yield
            return
        token = self._context.attach(self._trace.set_span_in_context(span.span, span.origin))
        try:
            yield
        finally:
            self._context.detach(token)
