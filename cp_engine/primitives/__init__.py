"""Primitives: what a composition may contain. Imports `plan` and what is below."""
