"""Checks of an engine and its device, each in a process of its own, and one page about what they found."""
