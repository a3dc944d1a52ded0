"""What a reuse rule is. A new model family picks from the three; a new rule is one new subclass."""

from __future__ import annotations

import importlib
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hicache.errors import ConfigError
from hicache.radix.node import DEVICE, HOST, Node
from hicache.types import ComponentSpec, ReuseRule, Tier

logger = logging.getLogger(__name__)

Has = Callable[[Node], bool]
"""Whether the component's payload of a node counts as resident in this vote."""


class Validator(Protocol):
    """One component's vote, fed the nodes of a path from the root outwards."""

    def __call__(self, node: Node, end: int, /) -> bool:
        """May a request reuse ``[0, end)``? ``end`` is the node's end or a page end inside it."""
        ...


class Lock(Protocol):
    """The receipt of ``Rule.lock``; the only way to undo it."""

    component: int

    def nodes(self) -> list[Node]:
        """The nodes it holds now."""
        ...

    def release(self) -> list[Node]:
        """Undo, once. Returns the nodes whose standing may have changed."""
        ...


class NodeLock:
    """A lock on single nodes."""

    def __init__(self, component: int, nodes: list[Node]) -> None:
        self.component = component
        self._nodes = nodes
        for node in nodes:
            node.locks[component] += 1

    def nodes(self) -> list[Node]:
        return list(self._nodes)

    def release(self) -> list[Node]:
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            node.locks[self.component] -= 1
        return nodes


class SpanLock:
    """A lock on the nodes that hold tokens from ``edge`` on, up to the end of one node.

    Each of them carries the edge, so a split hands it to the prefix exactly if the span reaches in::

          prefix | suffix            prefix | suffix
        ....[====|======]            .......|.[=====]
          locked | locked              free | locked
    """

    def __init__(self, component: int, node: Node, edge: int) -> None:
        self.component = component
        self._node: Node | None = node
        self._edge = edge
        for place in self.nodes():
            place.edges[component].append(edge)
            place.locks[component] += 1

    def nodes(self) -> list[Node]:
        held: list[Node] = []
        for place in self._node.up() if self._node is not None else ():
            if place.end <= self._edge:
                break
            held.append(place)
        return held

    def release(self) -> list[Node]:
        released = self.nodes()
        self._node = None
        for place in released:
            place.edges[self.component].remove(self._edge)
            place.locks[self.component] -= 1
        return released


class Rule(ABC):
    """A reuse rule for one component.

    Args:
        index: the component's place in the model's list, which indexes a node's arrays.
        spec: the component.
        page_size: tokens a page.
        depends_on: indices of components without whose payload, in L1 or L2 on the same node, this
            one is worth nothing.
    """

    keeps_pages = True
    """One slot a page; False: one state at the end of a node."""
    is_prefix = False
    """Payload is needed from the root on, so it leaves a tier from the tail only."""

    def __init__(
        self, index: int, spec: ComponentSpec, page_size: int, depends_on: tuple[int, ...] = ()
    ) -> None:
        self.index = index
        self.spec = spec
        self.page_size = page_size
        self.depends_on = depends_on

    @abstractmethod
    def validator(self, has: Has) -> Validator:
        """A fresh vote."""

    @abstractmethod
    def span(self, end: int) -> int:
        """First token (a page start) whose payload reuse at ``end`` needs; ``end`` for a state."""

    @abstractmethod
    def lock(self, node: Node) -> Lock:
        """Hold what reuse at the node's end needs, wherever it lives."""

    @abstractmethod
    def may_leave(self, node: Node, tier: Tier) -> bool:
        """May the payload leave the tier, as far as this rule is concerned?

        *Caller guarantees*: it is there and no copy touches it.
        """

    def is_duplicate(self, node: Node, tier: Tier) -> bool:
        """A host copy of what is also on the device."""
        return tier == HOST and node.slots[self.index][DEVICE] is not None


class SpanRule(Rule):
    """A rule that needs an unbroken span of pages before the boundary, and no other.

    A subclass that says where the span begins, and at most votes in another way, runs on both cores.
    One that overrides more runs on the Python core.
    """

    def validator(self, has: Has) -> Validator:
        """A fresh vote. *Implementation must* use of a node only ``start``, ``end`` and ``has``."""
        run_start: int | None = None  # where the unbroken payload that reaches up to here began

        def vote(node: Node, end: int) -> bool:
            nonlocal run_start
            needed_from = self.span(end)
            if not has(node):
                run_start = None
                return needed_from >= end
            if run_start is None:
                run_start = node.start
            return run_start <= needed_from

        return vote

    def lock(self, node: Node) -> Lock:
        return SpanLock(self.index, node, self.span(node.end))

    def may_leave(self, node: Node, tier: Tier) -> bool:
        return self.is_duplicate(node, tier) or not node.locks[self.index]


@dataclass(frozen=True, slots=True)
class Stop:
    """What the Rust core shows a vote of a node."""

    start: int
    end: int
    is_resident: bool


class GuardedRule(SpanRule):
    """A user's rule; where it fails, reuse needs everything or is vetoed, and the log says so once."""

    def __init__(self, rule: SpanRule) -> None:
        super().__init__(rule.index, rule.spec, rule.page_size, rule.depends_on)
        self._rule = rule
        self._has_failed = False

    def span(self, end: int) -> int:
        try:
            first = operator.index(self._rule.span(end))
            if not 0 <= first <= end or first % self.page_size:
                raise ValueError(f"span({end}) is {first}, which is no page start from 0 to {end}")
        except Exception as error:  # noqa: BLE001  # the code is the user's
            self._report(error)
            return 0
        return first

    def validator(self, has: Has) -> Validator:
        try:
            inner = self._rule.validator(has)
        except Exception as error:  # noqa: BLE001  # the code is the user's
            self._report(error)
            return lambda _node, _end: False

        def vote(node: Node, end: int) -> bool:
            try:
                return bool(inner(node, end))
            except Exception as error:  # noqa: BLE001  # the code is the user's
                self._report(error)
                return False

        return vote

    def _report(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning(
                "model.components.%s.rule: %s failed", self.spec.name, self.spec.rule, exc_info=error
            )


def runs_in_rust(spec: ComponentSpec) -> bool:
    """Whether the Rust core can ask this rule, which is written in Python, for all it needs."""
    fixed = ("lock", "may_leave", "is_duplicate", "keeps_pages", "is_prefix")
    try:
        rule = _load(spec)
    except ConfigError:
        return False
    return issubclass(rule, SpanRule) and all(
        getattr(rule, name) is getattr(SpanRule, name) for name in fixed
    )


def make_rule(index: int, spec: ComponentSpec, page_size: int, depends_on: tuple[int, ...]) -> Rule:
    """Build the rule a component names; raises ``ConfigError`` for a name that is none."""
    from hicache.radix.rules.checkpoint import CheckpointRule
    from hicache.radix.rules.path import PathRule
    from hicache.radix.rules.window import WindowRule

    match spec.rule:
        case ReuseRule.PATH:
            return PathRule(index, spec, page_size, depends_on)
        case ReuseRule.WINDOW:
            return WindowRule(index, spec, page_size, depends_on)
        case ReuseRule.CHECKPOINT:
            return CheckpointRule(index, spec, page_size, depends_on)
        case _:
            rule = _load(spec)(index, spec, page_size, depends_on)
            return GuardedRule(rule) if runs_in_rust(spec) and isinstance(rule, SpanRule) else rule


def _load(spec: ComponentSpec) -> type[Rule]:
    module_name, _, class_name = spec.rule.rpartition(".")
    where = f"model.components.{spec.name}.rule"
    if not module_name:
        raise ConfigError([f"{where}: {spec.rule!r} is not path, window, checkpoint or a dotted class path"])
    try:
        loaded = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError([f"{where}: cannot load {spec.rule!r}: {error}"]) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Rule)):
        raise ConfigError([f"{where}: {spec.rule!r} is not a subclass of Rule"])
    return loaded
