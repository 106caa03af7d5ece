from unittest.mock import patch

import vllm.v1.core.sched.scheduler as scheduler


def test_schedule():
    scheduler.Scheduler.schedule = lambda self: None
    with patch("vllm.v1.core.block_pool.BlockPool.__init__", None):
        pass
