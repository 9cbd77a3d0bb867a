"""Faults on purpose, and what every rank says then: ``python -m scripts.faults``."""
