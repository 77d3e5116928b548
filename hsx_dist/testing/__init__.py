"""What proves a codec or a store of your own: conformance suites for pytest, and stores that fail on purpose."""
