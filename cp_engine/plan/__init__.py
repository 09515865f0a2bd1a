"""Plan: the typed composition, the plan that follows from it, and the proof. Imports `kernels` and what is below."""
