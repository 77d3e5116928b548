"""Checks of an engine and its device, each in a separate process, and one page of results."""
