"""How the ranks of one model agree: a group, and what is agreed in it.

``group`` has the protocol and the group of one, ``in_process`` one of threads, ``gloo`` one of processes;
``agreement`` is what a cache asks of any of them.
"""
