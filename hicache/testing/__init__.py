"""Instruments for tests, shipped so that users can test their own stores, engines and policies.

Import from the modules: this package itself imports nothing.
"""
