"""Training text: what is already on every machine, or a folder of JSON-lines files."""

from cp_engine.hosts.torchtitan.text.sources import check, dataset_of, documents, place_of, tokenizer_problems

__all__ = ["check", "dataset_of", "documents", "place_of", "tokenizer_problems"]
