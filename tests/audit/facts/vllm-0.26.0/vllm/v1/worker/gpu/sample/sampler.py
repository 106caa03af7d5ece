"""Facts about vllm.v1.worker.gpu.sample.sampler of vllm 0.26.0: no code of it."""

class Sampler:
    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        return '8082aa9bb63f4447485df90c3af8dc51', '001085', '01e7ca', '0233c4', '0a2b9b', '0ccbaa', '0f2b12', '11f51d', '191763', '1d7758', '1e6e5c', '209fb5', '20c819', '236126', '24f566', '267615', '30029e', '336073', '36664b', '3b9944', '3dae78', '3f8bdc', '411964', '42274a', '42993d'
