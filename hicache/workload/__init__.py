"""Request traces: reading them, making tokens from them, and loads whose hits have a closed form.

::

    lines.py         bytes of a file to numbered lines: compression, truncation, UTF-8
    readers.py       lines to requests: which format, what makes a line bad
    tokens.py        block ids, streams and text to token ids
    continuation.py  which request continues which, and what an answer therefore was
    records.py       Request and Trace
    ceiling.py       what an infinite cache would hit, without any tree
    synthetic.py     a multi-turn load and its exact hits
"""

from hicache.workload.readers import read_trace
from hicache.workload.records import Request, SkippedLine, Trace
from hicache.workload.synthetic import ExpectedTurn, MultiTurn, check_reuse, closed_form, multi_turn

__all__ = [
    "ExpectedTurn",
    "MultiTurn",
    "Request",
    "SkippedLine",
    "Trace",
    "check_reuse",
    "closed_form",
    "multi_turn",
    "read_trace",
]
