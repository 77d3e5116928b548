"""Transport of pages from an engine's step to the writers: a ring, a channel, and an end in each process."""
