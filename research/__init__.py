"""Benchmarks and the papers' experiments; not part of the wheel."""
