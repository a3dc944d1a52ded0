"""HiCache: a hierarchical KV-cache tier manager for LLM inference."""
