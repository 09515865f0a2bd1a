"""Config: from YAML to a typed composition. Imports `primitives` and what is below."""
