"""TOML: files of torchtitan and torchtitan-npu as configurations, and back. Of `job` it imports `checks`."""
