"""What the project's own tests and demos use, shipped so that others can: models, servers, conformance suites."""
