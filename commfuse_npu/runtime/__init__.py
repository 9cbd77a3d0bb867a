"""Programs carried out: lanes over a process group, what runs on them, and what is recorded."""
