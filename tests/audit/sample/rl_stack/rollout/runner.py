"""Model runner, sampler, executor: what runs depends on the version."""

from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.sample import sampler
from vllm.v1.worker import gpu_model_runner as v1

from rl_stack.compat import HAS_V2_RUNNER

_rpc = RayDistributedExecutor.collective_rpc


@staticmethod
def compute_logprobs(logits):
    return logits.log_softmax(-1)


def sample(self, logits, spec_decode_metadata):
    return self.sampler(logits=logits, sampling_metadata=self.input_batch.sampling_metadata)


def patched_rpc(self, *args, **kwargs):
    return _rpc(self, *args, **kwargs)


def apply():
    sampler.Sampler.compute_logprobs = compute_logprobs
    v1.GPUModelRunner._sample = sample
    RayDistributedExecutor.collective_rpc = patched_rpc
    if HAS_V2_RUNNER:
        from vllm.v1.worker.gpu.sample.sampler import Sampler

        Sampler.__call__ = call
    if hasattr(v1.GPUModelRunner, "no_such_method"):
        v1.GPUModelRunner.no_such_method = sample


def call(self, logits, input_batch):
    return None
