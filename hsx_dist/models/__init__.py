"""Models that come with the package: the built-in one, and a tiny random one."""
