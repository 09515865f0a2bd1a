"""Ascend's fused operators: their schemas, what they compute, and what they refuse, so that an Ascend run can be rehearsed on a CPU.

Nothing here imports torch_npu. The schemas are those of the torch_npu version that `schemas.json` names.
"""
