"""Hosts that the engine can run in."""
