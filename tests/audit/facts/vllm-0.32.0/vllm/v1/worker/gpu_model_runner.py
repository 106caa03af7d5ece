"""Facts about vllm.v1.worker.gpu_model_runner of vllm 0.32.0: no code of it."""

class GPUModelRunner:
    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        return '9d4db6118742211ef45b76c20b663531', '064830', '1d7758', '2542a0', '2fc0f4', '3aa74c', '3f8bdc', '3fb8dd', '40de9a', '411964', '417318', '494896', '4a6ad0', '4fbac1', '5a9371', '5af90c', '630906', '727431', '78484e', '788b97', '7a2717', '7a67e7', '7aef5a', '7e838c', '7f41e6'
