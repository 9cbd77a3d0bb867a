"""Where the tables of the documentation come from: ``python -m scripts.evidence NAME``."""
