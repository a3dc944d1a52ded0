"""Verified replay: a trace through the real cache, with every reused byte checked.

::

    stamps.py       what the payload of a page must be
    simulated.py    an engine that writes and checks stamps instead of computing attention
    run.py          a trace through it; counts
    result.py       what came out, as numbers
    reference.py    the model of the published reference figures: metadata only, one tier
    tables.py       the numbers for people
"""
