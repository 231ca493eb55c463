"""The conformance suite: strategies, laws, goldens and field cases, for any backend."""
