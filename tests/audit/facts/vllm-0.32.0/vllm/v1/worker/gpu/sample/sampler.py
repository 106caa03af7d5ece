"""Facts about vllm.v1.worker.gpu.sample.sampler of vllm 0.32.0: no code of it."""

class Sampler:
    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        return '9145751ca6e525e3f3c2407ce54768ee', '001085', '01e7ca', '0233c4', '039efc', '065587', '065620', '07e4e8', '11ad5c', '11f51d', '167308', '191763', '1d7758', '1e6e5c', '209fb5', '20c819', '236126', '24f566', '2542a0', '267615', '27a408', '336073', '36664b', '3b9944', '3bc743'
