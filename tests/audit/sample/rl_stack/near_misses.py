"""None of this patches anybody."""

import os
import sys
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    vllm.__version__ = "0"

os.environ["VLLM_PLUGINS"] = "rl_stack"
torch.backends.cuda.matmul.allow_tf32 = False
sys.path.insert(0, ".")


class Mine(Scheduler):
    limit = 1

    def __init__(self, *args):
        super().__init__(*args)
        self.schedule = self.other
        self.limit = 2

    def other(self):
        return None


Mine.schedule = Mine.other


def local(layer, llm):
    layer.forward = torch.nn.functional.linear
    linear = ReplicatedLinear(1, 1)
    linear.apply = None
    copy = dict(vllm.envs.environment_variables)
    copy["X"] = None
    schedule = Scheduler.schedule
    schedule = Mine.other
    llm.engine.model = None
    return linear, copy, schedule
