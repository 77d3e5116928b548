"""Models of this package: the built-in model, and a tiny random one."""
