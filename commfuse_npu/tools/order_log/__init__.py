"""Order logs of a run: what each rank posted and waited for, read and verified."""
