"""The unified radix tree: decisions only, no tensor, no I/O."""
