"""Checks: what is refused before any process starts. Imports no other folder of `job`."""
