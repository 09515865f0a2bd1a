"""Algebra: who holds which positions, and what a mask lets each see; numbers only. Imports `errors` and nothing else of the package."""
