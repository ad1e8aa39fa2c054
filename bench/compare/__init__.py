"""Arms against each other on real servers."""
