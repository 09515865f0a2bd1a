"""Runtime: a plan on real ranks, as a context manager around a model. Imports `config` and what is below."""
