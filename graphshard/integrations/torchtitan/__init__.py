"""torchtitan: train with graphshard instead of FSDP2.

    torchrun ... -m torchtitan.train --module llama3 ...                                   # FSDP2
    torchrun ... -m torchtitan.train --module graphshard.integrations.torchtitan.llama3 ... # this

``llama3`` and ``qwen3`` contain torchtitan's configurations under the same names (``--config
llama3_8b``), changed by :func:`.configure.configure`. Change your own configurations the same way:

    def my_config() -> Trainer.Config:
        return configure(their_config(), schedule=SchedulePolicy(...))
"""
