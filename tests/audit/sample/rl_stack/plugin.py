"""What vLLM calls in each of its processes."""


def register():
    from rl_stack.rollout import layers, moe, runner, scheduling, tables

    layers.apply()
    moe.apply()
    scheduling.apply()
    runner.apply()
    tables.apply()
