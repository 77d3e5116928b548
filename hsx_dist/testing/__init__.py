"""Tests for user-defined codecs and stores: conformance suites for pytest, and stores that inject faults."""
