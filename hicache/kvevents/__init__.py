"""Residency events over ZeroMQ: what they look like, who sends them, who reads them."""
