"""Options and arguments of the ops, and the arithmetic of a layer."""
