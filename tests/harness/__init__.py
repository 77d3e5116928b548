"""What tests, benchmarks and demos start and load: servers, clusters, models, browsers."""
