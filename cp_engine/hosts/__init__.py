"""Hosts: the frameworks that the engine runs in, one folder each. Imports `runtime` and what is below."""
