"""Exchange: moves tensors between ranks. Imports `algebra` and what is below."""
