"""Plans carried out: lanes over a process group, the pipelines on them, and what is recorded."""
