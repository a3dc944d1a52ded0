"""More made-up loads, kept for the last: rules are chosen without them, and only what was chosen is measured on them.

Most are shaped after what serving projects ship to measure prefix caches; the rest are usual kinds of traffic that
``loads.py`` lacks. As there, numbers without a source are guesses, and none was chosen for what a policy makes of it.
"""

from __future__ import annotations

from collections.abc import Callable

from loads import DAY_S, HOUR_S, MINUTE_S, Ask, Draw, Popular, chat, code_completion, shared


# ---- what serving projects measure with -------------------------------------------------------------
def multi_turn_chats(seed: int) -> list[Ask]:
    """ShareGPT as clients replay it: no system prompt, short turns, exponential gaps, nobody names a session."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for _ in range(900):
        at_s += draw.gap_s(4)
        prompt, now_s = draw.new(draw.size(1, 0.9)), at_s
        for _ in range(draw.turns(3.5)):
            asks.append(Ask(now_s, list(prompt)))
            prompt, now_s = prompt + draw.new(draw.size(1.2, 0.7)), now_s + draw.gap_s(60)
    return asks


def shared_prefixes(seed: int) -> list[Ask]:
    """SGLang's generated shared prefixes: 64 system prompts of 2,048 tokens, 48 questions each, shuffled."""
    draw, asks, at_s = Draw(seed), [], 0.0
    groups = [group for group in range(64) for _ in range(48)]
    draw.shuffle(groups)
    for group in groups:
        at_s += draw.gap_s(0.5)
        asks.append(Ask(at_s, shared(group, 4) + draw.new(1)))
    return asks


def prefixes_in_turn(seed: int) -> list[Ask]:
    """As vLLM repeats prefixes, not shuffled: all prompts of one prefix, then those of the next."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for prefix in range(60):
        for _ in range(50):
            at_s += draw.gap_s(0.5)
            asks.append(Ask(at_s, shared(prefix, 6) + draw.new(draw.size(1, 0.4))))
    return asks


def document_rounds(seed: int) -> list[Ask]:
    """LMCache's long-document questions: each round asks about all documents, in an order of its own."""
    draw, asks, at_s = Draw(seed), [], 0.0
    documents = [(number, draw.size(24, 0.5)) for number in range(220)]
    for _ in range(8):
        for number, num_blocks in draw.sample(documents, len(documents)):
            at_s += draw.gap_s(2)
            asks.append(Ask(at_s, shared(number, num_blocks) + draw.new(1)))
    return asks


def multi_round_users(seed: int) -> list[Ask]:
    """LMCache's multi-round questions: 60 users with long histories at a time, at a fixed rate; who is done is replaced."""
    draw, asks, joined = Draw(seed), [], 60
    users = [(number, shared("system", 2) + draw.new(40), draw.randint(0, 9)) for number in range(60)]
    for at in range(3000):
        number, prompt, rounds = users[at % 60]
        asks.append(Ask(at * 1.5 + draw.random(), prompt, f"u{number}"))
        users[at % 60] = number, prompt + draw.new(1), rounds + 1
        if rounds == 9:
            users[at % 60] = joined, shared("system", 2) + draw.new(40), 0
            joined += 1
    return asks


# ---- agents and voices ------------------------------------------------------------------------------
def bursty_tools(seed: int) -> list[Ask]:
    """Agents on one tool prompt each: most tools answer within a second, some take minutes, and users longer."""
    draw, asks, at_s = Draw(seed), [], 0.0
    tools = Popular(draw, 40, 1.1)
    for number in range(420):
        at_s += draw.gap_s(15)
        tool, now_s = tools.pick(), at_s
        prompt = shared(("tool", tool), 6 + tool % 9) + draw.new(draw.size(2, 0.8))
        for _ in range(draw.turns(8)):
            stop = "end_turn" if draw.random() < 0.15 else "tool_use"
            asks.append(Ask(now_s, list(prompt), f"b{number}", stop))
            prompt = prompt + draw.new(draw.size(1, 0.9))
            slow_s = (300, 1.0) if stop == "end_turn" else (90, 0.8)
            now_s += draw.around(*((0.8, 0.5) if stop == "tool_use" and draw.random() < 0.8 else slow_s))
    return asks


def compacting_agents(seed: int) -> list[Ask]:
    """Coding agents that replace a context of 60 blocks by a summary, and go on."""
    draw, asks = Draw(seed), []
    for number in range(90):
        at_s, begin = draw.uniform(0, 4 * HOUR_S), shared(("agent", number % 3), 6)
        context = draw.new(draw.size(4, 0.7))
        for _ in range(draw.turns(35)):
            stop = "tool_use" if draw.random() < 0.9 else "end_turn"
            asks.append(Ask(at_s, begin + context, f"k{number}", stop))
            context = draw.new(3) if len(context) > 60 else context + draw.new(draw.size(1.5, 0.8))
            at_s += draw.around(*((12, 0.9) if stop == "tool_use" else (200, 1.2)))
    return asks


def voice_chats(seed: int) -> list[Ask]:
    """Spoken talks: seconds between turns, few blocks; each of 60 lines has a prompt, and each caller a record."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for number in range(1100):
        at_s += draw.gap_s(4)
        line, history, now_s = draw.randrange(60), 0, at_s
        own = draw.new(40)
        for _ in range(draw.turns(4.5, single=0.2)):
            asks.append(
                Ask(now_s, shared(("line", line), 3 + line % 5) + own[: 2 + history // 3], f"v{number}")
            )
            history, now_s = history + draw.randint(0, 2), now_s + draw.around(6, 0.7)
    return asks


def characters(seed: int) -> list[Ask]:
    """A game's 300 characters, each with a history of its own that all players' visits prolong; old parts are cut off."""
    draw, asks, at_s = Draw(seed), [], 0.0
    visited, histories = Popular(draw, 300, 0.9), [draw.new(draw.size(6, 0.6)) for _ in range(300)]
    for number in range(900):
        at_s += draw.gap_s(12)
        visited.drift(number % 2)
        which, now_s = visited.pick(), at_s
        for _ in range(draw.turns(3)):
            asks.append(Ask(now_s, shared("world", 3) + histories[which], f"n{which}"))
            longer = histories[which] + draw.new(1)
            histories[which] = longer[:4] + longer[16:] if len(longer) > 40 else longer
            now_s += draw.around(15, 0.8)
    return asks


# ---- batches and retrieval ---------------------------------------------------------------------------
def classification(seed: int) -> list[Ask]:
    """Jobs that put one instruction before each of some hundred texts, four at a time, and never the same again."""
    draw, asks = Draw(seed), []
    lanes = [0.0] * 4
    for job in range(45):
        lane, num_blocks = lanes.index(min(lanes)), draw.randint(2, 14)
        for _ in range(draw.randint(20, 120)):
            asks.append(Ask(lanes[lane], shared(("job", job), num_blocks) + draw.new(draw.size(2, 0.8))))
            lanes[lane] += draw.around(2, 0.6)
    return asks


def batches_beside_chats(seed: int) -> list[Ask]:
    """Chats with a tide; at night jobs beside them, whose texts come three times each, with a question each time."""
    draw, asks = Draw(seed), []
    for number in range(1000):
        at_s = draw.randrange(2) * DAY_S + draw.gauss(15, 4) * HOUR_S
        prompt = shared("system", 2) + draw.new(draw.size(2, 0.9))
        asks += chat(draw, at_s, prompt, draw.turns(4, single=0.3), (70, 1.2), session=f"d{number}")
    for night in range(2):
        at_s = night * DAY_S + HOUR_S
        for _ in range(250):
            text = shared(("job", night), 3) + draw.new(draw.size(6, 0.6))
            for _ in range(3):
                asks.append(Ask(at_s, text + draw.new(1)))
                at_s += draw.around(15, 0.5)
    return asks


def retrieval_chats(seed: int) -> list[Ask]:
    """Chats that look something up each turn; what was found stands before the question only in that turn."""
    draw, asks, at_s = Draw(seed), [], 0.0
    pieces = Popular(draw, 500, 1.0)
    for number in range(750):
        at_s += draw.gap_s(8)
        history, now_s = draw.new(1), at_s
        for _ in range(draw.turns(3.5)):
            found = shared(("piece", pieces.pick()), 2) + shared(("piece", pieces.pick()), 2)
            asks.append(Ask(now_s, shared("system", 3) + history + found + draw.new(1), f"q{number}"))
            history, now_s = history + draw.new(1), now_s + draw.around(60, 1.0)
    return asks


# ---- who comes when ----------------------------------------------------------------------------------
def two_tenants(seed: int) -> list[Ask]:
    """Long agents of one tenant, beside another's templates, each filled in once."""
    draw, asks = Draw(seed), []
    templates = Popular(draw, 120, 0.9)
    for number in range(70):
        prompt = shared("agent", 8) + draw.new(draw.size(6, 0.7))
        asks += chat(
            draw, draw.uniform(0, 3 * HOUR_S), prompt, draw.turns(18), (20, 1.0), session=f"a{number}"
        )
    for number in range(2600):
        which, at_s = templates.pick(), draw.uniform(0, 3.5 * HOUR_S)
        asks.append(Ask(at_s, shared(("template", which), 3 + which % 8) + draw.new(2), f"t{number}"))
    return asks


def unnamed_clients(seed: int) -> list[Ask]:
    """Chats without names whose last block never comes back as it was, so that few can be told to go on."""
    draw, asks, at_s = Draw(seed), [], 0.0
    for _ in range(900):
        at_s += draw.gap_s(5)
        kept, now_s = shared(("system", draw.randrange(4)), 3) + draw.new(draw.size(3, 0.8)), at_s
        for _ in range(draw.turns(4, single=0.3)):
            asks.append(Ask(now_s, kept + draw.new(2)))
            kept, now_s = kept + draw.new(draw.size(1.5, 0.5)), now_s + draw.around(50, 1.1)
    return asks


def changed_half_way(seed: int) -> list[Ask]:
    """Chats, until an editor's completions take their place at once."""
    draw, asks = Draw(seed), []
    for number in range(900):
        prompt = shared("system", 2) + draw.new(draw.size(4, 0.8))
        turns = draw.turns(3.5, single=0.4)
        asks += chat(draw, draw.uniform(0, 2 * HOUR_S), prompt, turns, (60, 1.0), session=f"c{number}")
    later = (ask for ask in code_completion(seed + 700) if ask.at_s < 2 * HOUR_S)
    return [ask for ask in asks if ask.at_s < 2 * HOUR_S] + [
        ask._replace(at_s=ask.at_s + 2 * HOUR_S, prompt=[("file", block) for block in ask.prompt])
        for ask in later
    ]


def own_catalogs(seed: int) -> list[Ask]:
    """Users with a catalog of tools each, who begin a session of a few turns whenever they come, for days."""
    draw, asks = Draw(seed), []
    users, sizes = Popular(draw, 160, 0.7), [draw.size(10, 0.5) for _ in range(160)]
    for number in range(1100):
        user, at_s = users.pick(), draw.randrange(2) * DAY_S + draw.gauss(13, 3) * HOUR_S
        prompt = shared("system", 2) + shared(("catalog", user), sizes[user]) + draw.new(1)
        asks += chat(draw, at_s, prompt, draw.turns(2), (0.5 * MINUTE_S, 1.0), (1, 0.5), f"o{number}")
    return asks


FINAL: dict[str, Callable[[int], list[Ask]]] = {
    load.__name__: load
    for load in (
        multi_turn_chats,
        shared_prefixes,
        prefixes_in_turn,
        document_rounds,
        multi_round_users,
        bursty_tools,
        compacting_agents,
        voice_chats,
        characters,
        classification,
        batches_beside_chats,
        retrieval_chats,
        two_tenants,
        unnamed_clients,
        changed_half_way,
        own_catalogs,
    )
}
"""The loads by name."""
