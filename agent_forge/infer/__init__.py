"""Generating text: with caches, in batches, as a stream."""
