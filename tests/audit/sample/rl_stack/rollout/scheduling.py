"""Scheduler, caches, the asynchronous engine."""

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as scheduling
from vllm.v1.engine.async_llm import AsyncLLM

_pause = AsyncLLM.pause_generation
_blocks = KVCacheManager.allocate_slots


class CountingScheduler(scheduling.Scheduler):
    steps = 0

    def schedule(self, throttle_prefills=False):
        type(self).steps += 1
        return super().schedule(throttle_prefills)


async def pause(self, *, mode="abort", wait_for_inflight_requests=None, clear_cache=True):
    await _pause(
        self,
        mode=mode,
        wait_for_inflight_requests=wait_for_inflight_requests,
        clear_cache=clear_cache,
    )


async def rpc(self, method, timeout=None, args=(), kwargs=None):
    results = await self.engine_core.collective_rpc_async(method, timeout, args, kwargs)
    return list(results)


def allocate(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None,
             num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False,
             num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0,
             has_scheduled_reqs=True):
    return None


def heads(self, parallel_config):
    return 8


def apply():
    scheduling.Scheduler = CountingScheduler
    AsyncLLM.pause_generation = pause
    AsyncLLM.collective_rpc = rpc
    KVCacheManager.allocate_slots = allocate
    vllm.config.model.ModelConfig.get_num_kv_heads = heads
    if vllm.__version__.startswith("0.25"):
        AsyncLLM.sleep = None
