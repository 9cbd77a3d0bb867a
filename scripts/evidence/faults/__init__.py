"""Faults on purpose, and what every rank says then."""
