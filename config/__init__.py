"""YAML to validated models."""
