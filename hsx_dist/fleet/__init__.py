"""Start, placement and failures of replicas and writers, in this process or on a Ray cluster."""
