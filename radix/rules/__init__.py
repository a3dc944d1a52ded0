"""One file per reuse rule."""
