"""When to wait for a prefetch, and when to demote ahead of need."""
