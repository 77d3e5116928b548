"""How pages travel from an engine's step to the writers: a ring, a channel, and an end on each side of them."""
