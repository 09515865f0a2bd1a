"""Sparse kernels: attention to selected keys, the indexer that selects them, and its loss. Part of `kernels`."""
