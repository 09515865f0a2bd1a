"""Verify: a composition against dense attention, and against torchtitan alone. Of `job` it imports `checks` and `launch`."""
