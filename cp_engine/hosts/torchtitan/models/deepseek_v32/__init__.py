"""DeepSeek-V3.2 in plain PyTorch, on CPU and CUDA: torchtitan's DeepSeek-V3 with sparse attention and its lightning indexer.

`spec.get_train_spec()` is what torchtitan trains. Its modules import torchtitan, on CPU inside `cpu_shims`.
Source: the DeepSeek-V3.2 report, and inference/model.py of deepseek-ai/DeepSeek-V3.2-Exp (as of 2025-11-17, when the
indexer's rope became non-interleaved). All code here is our own.
"""
