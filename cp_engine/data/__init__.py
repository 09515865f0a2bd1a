"""Training text: what is already on every machine, or a folder of JSON-lines files."""

from cp_engine.data.sources import check, documents

__all__ = ["check", "documents"]
