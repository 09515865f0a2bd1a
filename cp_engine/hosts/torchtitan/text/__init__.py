"""Training text: what is already on every machine, or a folder of JSON-lines files. Part of `hosts`."""
