"""From a prompt to a lease: what L3 is asked for, and the match that its answer allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from hicache.last_prompts import LastPrompts
from hicache.lease import Lease
from hicache.radix.check import check_priority
from hicache.radix.interface import StoreQuery, Tokens
from hicache.radix.keys import as_tokens
from hicache.runtime import Runtime
from hicache.sessions import check_name
from hicache.stores import StoreSet
from hicache.tracing import Span
from hicache.types import Namespace, PageKey

Presence = Mapping[str, list[bool]]
"""Per component, whether L3 has each page that it was asked for."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a lease is wanted for. ``prompt`` is a copy: the caller may use its array for something else."""

    prompt: Tokens
    session: str | None
    namespace: Namespace
    priority: int


def checked_request(tokens: object, session: str | None, namespace: Namespace, priority: int) -> Request:
    """Raises ``ValueError`` for what makes no sense, with the place."""
    if session is not None:
        check_name(session)
    prompt = as_tokens(tokens).copy()
    check_namespace(namespace)
    check_priority(priority)
    return Request(prompt, session, namespace, priority)


def check_namespace(namespace: object) -> None:
    """Raises ``ValueError`` for anything but a ``Namespace`` of strings."""
    if not isinstance(namespace, Namespace):
        raise ValueError(f"a namespace is a hicache.Namespace, got {namespace!r:.80}")
    for part in (namespace.salt, namespace.lora, namespace.extra):
        if part is not None and not isinstance(part, str):
            raise ValueError(f"parts of a namespace are strings or None, got {part!r:.80}")


@dataclass(frozen=True, slots=True)
class Question:
    """What L3 is to be asked for a request, and in which of its epochs (``StoreSet.epoch``)."""

    query: StoreQuery
    epoch: int

    @property
    def num_keys(self) -> int:
        return self.query.num_keys

    def keys(self) -> dict[str, list[PageKey]]:
        """Per component."""
        return {name: list(pairs.keys()) for name, pairs in self.query.keys.items()}


class Matcher:
    """Opens the leases of one cache.

    Args:
        prompts: told what each session sends.
    """

    def __init__(self, runtime: Runtime, stores: StoreSet, prompts: LastPrompts) -> None:
        self._runtime = runtime
        self._stores = stores
        self._prompts = prompts

    def question(self, request: Request) -> Question:
        """What L3 has to be asked for; nothing if the tree knows it, or it is too little."""
        with self._runtime.lock:
            self._runtime.check_open()
            self._runtime.pump()
            return Question(self._query(request), self._stores.epoch)

    def _query(self, request: Request) -> StoreQuery:
        runtime = self._runtime
        prompt, namespace = request.prompt, request.namespace
        if self._knows_store():
            return StoreQuery({})
        query = runtime.core.store_query(prompt, namespace)
        longest = max((len(pairs) for pairs in query.keys.values()), default=0)
        if longest * runtime.page_size >= runtime.prefetch.min_tokens:
            return query
        # Too little to look for; but what the tree believes in L3 is not promised without asking.
        is_believed = runtime.core.probe(prompt, namespace).source.store > 0
        return query if is_believed else StoreQuery({})

    def agreed(self, question: Question, answers: Presence | None) -> Presence | None:
        """What L3 has on all ranks; None if one of them got no answer."""
        if self._runtime.ranks.is_alone:
            return answers
        counts = {name: len(pairs) for name, pairs in question.query.keys.items()}
        own = [0] * question.num_keys
        if answers is not None:
            own = [there for name in counts for there in answers[name]]
        was_answered, *agreed = self._runtime.step("match", [answers is not None, *own])
        self._runtime.ranks.note_absent(sum(own) - (sum(agreed) if was_answered else 0))
        if not was_answered:
            return None
        presence = map(bool, agreed)
        return {name: list(islice(presence, count)) for name, count in counts.items()}

    def open(self, request: Request, question: Question, answers: Presence | None, span: Span) -> Lease:
        """Tell the tree what L3 has, and match. An answer from before pages were thrown away is none."""
        runtime, prompt = self._runtime, request.prompt
        session, namespace, priority = request.session, request.namespace, request.priority
        with runtime.lock:
            runtime.check_open()
            runtime.pump()
            if answers is not None and question.epoch != self._stores.epoch:
                runtime.faults["probe_outdated"] += 1
                answers = None
            elif answers is not None:
                found = {
                    name: dict(zip(pairs.pages(), answers[name], strict=True))
                    for name, pairs in question.query.keys.items()
                }
                runtime.core.learn(prompt, found, namespace)
            elif question.num_keys:
                runtime.faults["probe_failed"] += 1
            runtime.tell()
            runtime.kept.lapse(runtime.core)
            number = runtime.sessions.number_of(session)
            matched = runtime.core.match(prompt, namespace, session=number, priority=priority)
            unfound = None
            if runtime.explainer is not None:
                unfound = runtime.explainer.unfound(
                    prompt,
                    namespace,
                    matched.found,
                    store_answered=answers is not None or not question.num_keys,
                )
            number = runtime.sessions.begin(session, matched, priority, runtime.core)
            if session is not None:
                self._prompts.note(session, namespace, prompt)
            runtime.run(matched.actions)
            span.note(found_tokens=matched.found.boundary)
            return Lease(
                runtime,
                prompt,
                matched,
                session=session,
                number=number,
                namespace=namespace,
                priority=priority,
                kept_ends=runtime.kept.ends(prompt, namespace) if runtime.is_hybrid else (),
                unfound=unfound,
                span=span,
            )

    def _knows_store(self) -> bool:
        """The tree has seen every page that a private store holds, so there is nothing to ask.

        Once such a store has evicted a page, it is asked like any other: evictions do not come back to the tree.
        """
        store = self._stores.top
        if store is None:
            return True
        if not self._runtime.ranks.is_alone:
            return False  # what another rank's store has evicted is not known here
        if not store.is_private or self._stores.must_ask or store.stats().pages_evicted:
            return False
        return not self._runtime.core.counters().get("beliefs_forgotten", 0)
