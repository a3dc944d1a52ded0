"""Made-up loads, shaped after public traces and usual ways to use a model; ``policy_loads.py`` measures on them.

A load is a function of a seed that gives requests: when, of which session (None: unnamed), why the answer before
ended, and the prompt as blocks of 512 tokens. ``LOADS`` has them by name. Numbers without a source are guesses of what
is usual; none was chosen for what a policy makes of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from hicache.workload import Trace
from hicache.workload.continuation import BlockRecord, link_requests
from hicache.workload.tokens import BLOCK_TOKENS

DAY_S, HOUR_S, MINUTE_S = 86_400.0, 3_600.0, 60.0
Prompt = list[Hashable]


class Ask(NamedTuple):
    """One request."""

    at_s: float
    prompt: Prompt
    session: str | None = None
    stop: str = ""


class Draw(random.Random):
    """A random source with the few shapes that loads have."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._num_new = 0

    def new(self, num_blocks: int) -> Prompt:
        """Blocks that nobody else has."""
        self._num_new += num_blocks
        return list(range(self._num_new - num_blocks, self._num_new))

    def around(self, median: float, spread: float) -> float:
        """Log-normal: ``spread`` is the standard deviation of the logarithm."""
        return median * math.exp(spread * self.gauss(0, 1))

    def size(self, median: float, spread: float, most: int = 200) -> int:
        return min(most, max(1, round(self.around(median, spread))))

    def turns(self, mean: float, single: float = 0.0) -> int:
        """How many turns a session has: geometric, but a share of them has one."""
        return 1 if self.random() < single else 1 + int(self.expovariate(1 / mean))

    def gap_s(self, mean_s: float) -> float:
        return self.expovariate(1 / mean_s)


class Popular:
    """Things asked for by Zipf's law; some of them may change places as time goes by."""

    def __init__(self, draw: Draw, num: int, exponent: float) -> None:
        self._draw, self._order = draw, list(range(num))
        self._weights = list(accumulate((rank + 1) ** -exponent for rank in range(num)))
        draw.shuffle(self._order)

    def pick(self) -> int:
        return self._order[self._draw.choices(range(len(self._order)), cum_weights=self._weights)[0]]

    def drift(self, num: int = 1) -> None:
        for _ in range(num):
            a, b = self._draw.randrange(len(self._order)), self._draw.randrange(len(self._order))
            self._order[a], self._order[b] = self._order[b], self._order[a]


def shared(name: Hashable, num_blocks: int) -> Prompt:
    """Blocks that everyone has who names them."""
    return [(name, i) for i in range(num_blocks)]


def chat(
    draw: Draw,
    at_s: float,
    prompt: Prompt,
    turns: int,
    gap_s: tuple[float, float],
    grows: tuple[float, float] = (1.5, 0.6),
    session: str | None = None,
    stop: str = "",
) -> list[Ask]:
    """A session whose prompt grows each turn; gaps and growth are medians and spreads."""
    asks = []
    for _ in range(turns):
        asks.append(Ask(at_s, list(prompt), session, stop))
        prompt = prompt + draw.new(draw.size(*grows))
        at_s += draw.around(*gap_s)
    return asks


# ---- public traces' shapes ------------------------------------------------------------------------
def conversation(seed: int, sessions: int = 2200, named: bool = False, scale: float = 1.0) -> list[Ask]:
    """Mooncake's conversation: three quarters of one turn, long prompts, one short system prompt."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for number in range(sessions):
        at_s += draw.gap_s(1.5)
        prompt = shared("system", 1) + draw.new(draw.size(9, 1.1))
        turns = draw.turns(4.0, single=0.74)
        asks += chat(draw, at_s, prompt, turns, (75, 0.9), (3, 0.9), f"c{number}" if named else None)
    return [ask._replace(at_s=ask.at_s * scale) for ask in asks]


def tool_agent(seed: int, scale: float = 1.0) -> list[Ask]:
    """Mooncake's toolagent: long prompts of tools by popularity, a short part of one's own, seldom a second turn."""
    draw, asks, at_s = Draw(seed), [], 0.0
    tools, sizes = Popular(draw, 90, 1.2), [draw.randint(5, 16) for _ in range(90)]
    for _ in range(4500):
        at_s += draw.gap_s(0.5)
        tool = tools.pick()
        prompt = shared(("tool", tool), sizes[tool]) + draw.new(draw.size(2.5, 1.0))
        asks += chat(draw, at_s, prompt, draw.turns(2.0, single=0.7), (12, 0.7), (1, 0.5))
    return [ask._replace(at_s=ask.at_s * scale) for ask in asks]


def long_documents(seed: int) -> list[Ask]:
    """Mooncake's synthetic: questions on long documents, in a row or spread out, beside short chats."""
    draw, asks = Draw(seed), []
    for document in range(260):
        prompt, at_s = draw.new(draw.size(50, 0.7)), draw.uniform(0, 8 * HOUR_S)
        for _ in range(draw.randint(1, 12)):
            asks.append(Ask(at_s, prompt + draw.new(1)))
            at_s += draw.around(20 if document % 2 else 600, 1.0)
    for _ in range(900):
        asks += chat(draw, draw.uniform(0, 8 * HOUR_S), draw.new(1), draw.turns(3.0), (60, 1.0))
    return asks


def code_completion(seed: int) -> list[Ask]:
    """Azure's code trace: an editor asks again and again; what stands before the cursor changes near the end."""
    draw, asks = Draw(seed), []
    for _ in range(420):
        file, at_s = draw.new(draw.size(5, 0.8, 40)), draw.uniform(0, 4 * HOUR_S)
        for _ in range(draw.turns(10)):
            asks.append(Ask(at_s, file + draw.new(1)))
            at_s += draw.around(9, 1.2)
            if draw.random() < 0.3:
                kept = draw.randint(len(file) // 2, len(file))
                file = file[:kept] + draw.new(max(1, len(file) - kept))
    return asks


def short_chats(seed: int) -> list[Ask]:
    """Azure's chat trace: short prompts of many applications, each with a prompt of its own; mostly one turn."""
    draw, asks, at_s = Draw(seed), [], 0.0
    applications = Popular(draw, 150, 1.0)
    for _ in range(4200):
        at_s += draw.gap_s(2)
        application = applications.pick()
        prompt = shared(application, 1 + application % 4) + draw.new(draw.size(1, 0.7))
        asks += chat(draw, at_s, prompt, draw.turns(2.0, single=0.6), (50, 1.1), (1, 0.4))
    return asks


def gamma_bursts(seed: int) -> list[Ask]:
    """BurstGPT: arrivals in bursts, chats with nothing in common, pauses of all lengths."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for number in range(1500):
        at_s += draw.gammavariate(0.2, 100)
        prompt = draw.new(draw.size(2, 1.0))
        asks += chat(draw, at_s, prompt, draw.turns(3.0, single=0.4), (120, 1.8), (1.5, 0.7), f"b{number}")
    return asks


def public_chats(seed: int, by_user: bool = False) -> list[Ask]:
    """WildChat, LMSYS: chats with a few system prompts, by day; the session is the chat or its user."""
    draw, asks = Draw(seed), []
    users = Popular(draw, 250, 0.8)
    for number in range(1500):
        at_s = draw.randrange(3) * DAY_S + draw.gauss(14, 3) * HOUR_S
        prompt = shared(("system", int(draw.expovariate(0.6))), 3) + draw.new(draw.size(1.5, 0.9))
        name = f"u{users.pick()}" if by_user else f"w{number}"
        asks += chat(draw, at_s, prompt, draw.turns(3.5, single=0.45), (80, 1.5), (1.5, 0.6), name)
    return asks


# ---- retrieval -----------------------------------------------------------------------------------
def retrieval(seed: int) -> list[Ask]:
    """Retrieved pieces in order of relevance after one system prompt; what is asked about changes by the hour."""
    draw, asks, at_s = Draw(seed), [], 0.0
    topics = Popular(draw, 300, 0.9)
    for number in range(3500):
        at_s += draw.gap_s(3)
        if number % 30 == 0:
            topics.drift(2)
        topic, prompt = topics.pick(), shared("system", 2)
        for piece in sorted(draw.sample(range(6), 3), key=lambda each: each + draw.gauss(0, 0.7)):
            prompt = prompt + shared((topic, piece), 3)
        asks.append(Ask(at_s, prompt + draw.new(1)))
    return asks


def document_chats(seed: int) -> list[Ask]:
    """Chats on documents of which some are in fashion for a while."""
    draw, asks, at_s = Draw(seed), [], 0.0
    documents, sizes = Popular(draw, 400, 1.0), [draw.size(18, 0.7) for _ in range(400)]
    for number in range(1300):
        at_s += draw.gap_s(20)
        documents.drift(number % 2)
        document = documents.pick()
        prompt = shared(document, sizes[document]) + draw.new(1)
        asks += chat(draw, at_s, prompt, draw.turns(2.5), (70, 1.0), (1, 0.5), f"d{number}")
    return asks


# ---- agents --------------------------------------------------------------------------------------
def coding_agents(seed: int, named: bool = True, scale: float = 1.0) -> list[Ask]:
    """Agents that send out up to four others at a time, which share its system prompt, or its whole context."""
    draw, asks = Draw(seed), []

    def work(at_s: float, name: str, prompt: Prompt, turns: int, depth: int) -> float:
        for turn in range(turns):
            stop = "end_turn" if draw.random() < 0.12 or turn == turns - 1 else "tool_use"
            asks.append(Ask(at_s, list(prompt), name if named else None, stop))
            prompt = prompt + draw.new(draw.size(1.6, 0.9, 30))
            at_s += draw.around(15, 0.9) if stop == "tool_use" else draw.around(240, 1.3)
            if depth == 0 and draw.random() < 0.06:
                begin = prompt if draw.random() < 0.4 else prompt[:8] + shared("helper", 3)
                helpers = range(draw.randint(1, 4))
                at_s = max(
                    work(at_s + i, f"{name}-{turn}-{i}", begin + draw.new(1), draw.turns(6), 1)
                    for i in helpers
                )
        return at_s

    for number in range(110):
        begin = shared(("system", number % 2), 8) + draw.new(draw.size(5, 0.8))
        work(draw.uniform(0, 5 * HOUR_S), f"a{number}", begin, 2 + draw.turns(20), 0)
    return [ask._replace(at_s=ask.at_s * scale) for ask in asks]


def tree_search(seed: int) -> list[Ask]:
    """Problems searched breadth first: of each level's thoughts the best two go on, three times each."""
    draw, asks = Draw(seed), []
    for problem in range(130):
        at_s, thoughts = draw.uniform(0, 2 * HOUR_S), [shared("few-shot", 6) + draw.new(draw.size(3, 0.6))]
        for _ in range(draw.randint(3, 7)):
            asked = [thought + draw.new(1) for thought in thoughts for _ in range(3)]
            asks += [Ask(at_s + draw.random(), thought, f"p{problem}") for thought in asked]
            thoughts, at_s = draw.sample(asked, 2), at_s + draw.around(20, 0.5)
    return asks


def self_consistency(seed: int) -> list[Ask]:
    """Each question of a task is sampled many times, some at once and the rest as slots come free."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for question in range(330):
        prompt = shared(("task", question // 60), 10) + draw.new(draw.size(3, 0.8))
        at_s += draw.gap_s(20)
        asks += [Ask(at_s + draw.around(4, 1.2), list(prompt)) for _ in range(draw.choice((5, 10, 20)))]
    return asks


# ---- batches -------------------------------------------------------------------------------------
def evaluation_sweeps(seed: int, again: int = 3) -> list[Ask]:
    """A suite of tasks, eight at a time, questions after the task's examples; run again hours later."""
    draw, asks = Draw(seed), []
    tasks = [
        (shared(("task", task), draw.randint(4, 30)), [draw.new(draw.size(1.5, 0.5)) for _ in range(40)])
        for task in range(32)
    ]
    for run in range(again):
        lanes = [run * 3 * HOUR_S] * 8
        for examples, questions in draw.sample(tasks, len(tasks)):
            lane = lanes.index(min(lanes))
            for question in questions:
                asks.append(Ask(lanes[lane], examples + question))
                lanes[lane] += draw.around(3, 0.5)
    return asks


def cron_jobs(seed: int) -> list[Ask]:
    """Jobs that ask at fixed periods, with a long prompt of their own and fresh data."""
    draw, asks = Draw(seed), []
    for job in range(200):
        period_s = draw.choice((5, 15, 15, 30, 60, 60)) * MINUTE_S
        prompt, at_s = shared(("job", job), draw.size(12, 0.8)), draw.uniform(0, period_s)
        while at_s < 8 * HOUR_S:
            asks.append(Ask(at_s + draw.uniform(0, 5), prompt + draw.new(1)))
            at_s += period_s
    return asks


def nightly_batches(seed: int) -> list[Ask]:
    """Chats by day; by night one long job after another over the same prompts."""
    draw = Draw(seed)
    asks = [ask for ask in public_chats(seed + 1000) if ask.at_s % DAY_S > 6 * HOUR_S]
    for day in range(3):
        at_s = day * DAY_S
        while at_s < day * DAY_S + 5 * HOUR_S:
            prompt, number = shared(("batch", draw.randrange(5)), draw.randint(2, 12)), draw.randint(50, 250)
            for _ in range(number):
                at_s += draw.gap_s(8)
                asks.append(Ask(at_s, prompt + draw.new(draw.size(3, 0.8))))
    return asks


# ---- who comes when --------------------------------------------------------------------------------
def tenants(seed: int) -> list[Ask]:
    """Fourteen tenants of very different size: templates, chats or agents."""
    draw, asks = Draw(seed), []
    for tenant in range(14):
        for number in range(int(1800 / (tenant + 1))):
            at_s, name = draw.uniform(0, 6 * HOUR_S), f"t{tenant}-{number}"
            begin = shared(("tenant", tenant), 2 + 3 * (tenant % 4))
            if tenant % 3 == 0:
                begin = begin + shared(("template", tenant, draw.randrange(6)), 4)
                asks.append(Ask(at_s, begin + draw.new(draw.size(2, 0.7)), name))
            else:
                gap, stop = ((20, 0.9), "tool_use") if tenant % 3 == 1 else ((90, 1.2), "end_turn")
                turns = draw.turns(4)
                asks += chat(draw, at_s, begin + draw.new(2), turns, gap, session=name, stop=stop)
    return asks


def next_morning(seed: int) -> list[Ask]:
    """Sessions that are left over night, or over days, and gone on with; beside passing chats."""
    draw, asks = Draw(seed), []
    for number in range(220):
        prompt, day = shared("system", 4) + draw.new(draw.size(8, 0.8)), draw.randrange(2)
        while day < 4:
            at_s = day * DAY_S + draw.gauss(11, 2) * HOUR_S
            part = chat(draw, at_s, prompt, draw.turns(4), (150, 1.2), (2, 0.6), f"m{number}")
            asks, prompt, day = asks + part, part[-1].prompt + draw.new(1), day + draw.choice((1, 1, 2, 3, 9))
    for number in range(1200):
        at_s = draw.randrange(4) * DAY_S + draw.gauss(13, 3) * HOUR_S
        asks += chat(
            draw, at_s, shared("system", 4) + draw.new(2), draw.turns(2), (60, 1), session=f"p{number}"
        )
    return asks


def shifts(seed: int) -> list[Ask]:
    """The kind of load changes every two hours: agents, popular prompts, chats, agents again."""
    parts = (coding_agents(seed), tool_agent(seed + 1), conversation(seed + 2), coding_agents(seed + 3))
    asks = []
    for number, part in enumerate(parts):
        for ask in part:
            if ask.at_s < 1.2 * HOUR_S:
                prompt: Prompt = [(number, block) for block in ask.prompt]
                name = None if ask.session is None else f"{number}-{ask.session}"
                asks.append(Ask(number * 2 * HOUR_S + ask.at_s, prompt, name, ask.stop))
    return asks


def deployments(seed: int) -> list[Ask]:
    """Applications of which one or another gets a new system prompt from time to time; one turn mostly, all named."""
    draw, asks, at_s = Draw(seed), [], 0.0
    applications, versions = Popular(draw, 120, 0.9), [0] * 120
    for number in range(4200):
        at_s += draw.gap_s(2)
        if number % 60 == 0:
            versions[draw.randrange(120)] += 1
        which = applications.pick()
        prompt = shared((which, versions[which]), 4 + which % 12) + draw.new(1)
        asks += chat(draw, at_s, prompt, draw.turns(2, single=0.8), (40, 1), (1, 0.5), f"n{number}")
    return asks


def code_reviews(seed: int) -> list[Ask]:
    """Changes to repositories by popularity, each looked at by several reviewers who begin alike, then go on alone."""
    draw, asks, at_s = Draw(seed), [], 0.0
    repositories = Popular(draw, 60, 1.0)
    for change in range(420):
        at_s += draw.gap_s(60)
        begin = shared(("repository", repositories.pick()), 12) + draw.new(draw.size(6, 0.9))
        for reviewer in range(draw.randint(1, 5)):
            first_s = at_s + draw.around(30, 1.5)
            asks += chat(
                draw, first_s, begin + draw.new(1), draw.turns(3), (25, 1), (1, 0.6), f"r{change}-{reviewer}"
            )
    return asks


def personas(seed: int) -> list[Ask]:
    """Role play: many characters by popularity, long chats with pauses, some forked or taken back."""
    draw, asks, at_s = Draw(seed), [], 0.0
    characters = Popular(draw, 500, 0.8)
    for number in range(650):
        at_s += draw.gap_s(40)
        which = characters.pick()
        prompt, now_s = shared(which, 3 + which % 6) + draw.new(1), at_s
        for _ in range(draw.turns(7)):
            asks.append(Ask(now_s, list(prompt), f"g{number}"))
            if draw.random() < 0.15:
                prompt = prompt[: max(1, len(prompt) - draw.randint(1, 3))]
            prompt, now_s = prompt + draw.new(1), now_s + draw.around(45, 1.4)
    return asks


def cut_histories(seed: int) -> list[Ask]:
    """Chats that drop their oldest turns once they are too long: but the system prompt nothing is met again then."""
    draw, asks = Draw(seed), []
    for number in range(420):
        at_s, history = draw.uniform(0, 6 * HOUR_S), draw.new(1)
        for _ in range(draw.turns(12)):
            asks.append(Ask(at_s, shared("system", 3) + history[-14:], f"h{number}"))
            history, at_s = history + draw.new(draw.size(1.5, 0.6)), at_s + draw.around(50, 1.1)
    return asks


def retries(seed: int) -> list[Ask]:
    """A gateway that sends again what took too long, and now and then everything to both of two models."""
    draw, asks = Draw(seed), []
    for ask in conversation(seed + 500, sessions=1500):
        asks.append(ask)
        while draw.random() < 0.25:
            asks.append(ask := ask._replace(at_s=ask.at_s + draw.around(30, 0.8)))
    return asks


LOADS: dict[str, Callable[[int], list[Ask]]] = {
    "conversation": conversation,
    "conversation_named_slow": lambda seed: conversation(seed, named=True, scale=12.0),
    "tool_agent": tool_agent,
    "tool_agent_slow": lambda seed: tool_agent(seed, scale=30.0),
    "long_documents": long_documents,
    "code_completion": code_completion,
    "short_chats": short_chats,
    "gamma_bursts": gamma_bursts,
    "public_chats": public_chats,
    "public_chats_by_user": lambda seed: public_chats(seed, by_user=True),
    "retrieval": retrieval,
    "document_chats": document_chats,
    "coding_agents": coding_agents,
    "coding_agents_unnamed": lambda seed: coding_agents(seed, named=False),
    "coding_agents_fast": lambda seed: coding_agents(seed, scale=0.1),
    "tree_search": tree_search,
    "self_consistency": self_consistency,
    "evaluation_sweeps": evaluation_sweeps,
    "evaluation_once": lambda seed: evaluation_sweeps(seed, again=1),
    "cron_jobs": cron_jobs,
    "nightly_batches": nightly_batches,
    "tenants": tenants,
    "next_morning": next_morning,
    "shifts": shifts,
    "deployments": deployments,
    "code_reviews": code_reviews,
    "personas": personas,
    "cut_histories": cut_histories,
    "retries": retries,
}
CHOOSING = frozenset(sorted(LOADS)[::2])
"""The half by which rules of ``adaptive`` were chosen; the other half is only measured."""


def make_trace(name: str, seed: int) -> Trace:
    """The load as a trace. Raises ``KeyError`` for an unknown name."""
    return as_trace(f"{name}-{seed}", LOADS[name](seed))


def as_trace(name: str, asks: Iterable[Ask]) -> Trace:
    """Blocks are numbered by what they are and all that stands before them, as in a hash trace."""
    numbers: dict[tuple[int, Hashable], int] = {}
    records = []
    for ask in sorted(asks, key=lambda each: each.at_s):
        ids: list[int] = []
        for block in ask.prompt:
            ids.append(numbers.setdefault((ids[-1] if ids else -1, block), len(numbers)))
        records.append(
            BlockRecord(
                arrival_s=ask.at_s,
                input_length=BLOCK_TOKENS * len(ids),
                output_length=0,
                block_ids=np.array(ids, dtype=np.int64),
                session=ask.session,
                stop=ask.stop,
            )
        )
    return Trace(name, "blocks", link_requests(records))
