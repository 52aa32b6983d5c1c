"""torchtitan: its trainer with a model that graphshard shards and compiles, in place of FSDP2.

    torchrun ... -m torchtitan.train --module llama3 ...                                   # FSDP2
    torchrun ... -m torchtitan.train --module graphshard.integrations.torchtitan.llama3 ... # this

``llama3`` and ``qwen3`` hold torchtitan's own configurations, each by its name (``--config
llama3_8b``), as :func:`.configure.configure` changes them; a configuration of yours needs the same:

    def my_config() -> Trainer.Config:
        return configure(their_config(), schedule=SchedulePolicy(...))
"""
