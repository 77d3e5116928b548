"""Seeing a run: progress in the terminal."""
