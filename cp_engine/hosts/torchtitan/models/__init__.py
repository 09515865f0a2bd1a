"""Models that no library ships for torchtitan: name -> the module that describes it to torchtitan by `get_train_spec`."""

from collections.abc import Mapping

OWN: Mapping[str, str] = {"deepseek_v32": "cp_engine.hosts.torchtitan.models.deepseek_v32.spec"}
