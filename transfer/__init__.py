"""Moves bytes between tiers: streams, copies, store I/O, tickets and completions."""
