"""Ops of hybrid models over packed sequences and slot-addressed caches. Depends on jax alone."""
