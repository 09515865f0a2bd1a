"""Kernels: one tile of attention, or one selection of keys, on one device. Imports `exchange` and what is below."""
