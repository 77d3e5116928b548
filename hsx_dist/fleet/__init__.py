"""Replicas and writers, their places and their lives: in this process, or on a Ray cluster."""
