"""Generates the tables and pictures of the documentation: ``python -m scripts.evidence.NAME``."""
