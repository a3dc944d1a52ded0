"""Adapters: HiCache inside engines that exist. Each module imports its engine only when it is used."""
