"""torchtitan 0.2.2 and torchtitan-npu 0.2.2 as hosts: their attention modules, trainers and models. Part of `hosts`."""
