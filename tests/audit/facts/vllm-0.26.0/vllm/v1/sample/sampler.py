"""Facts about vllm.v1.sample.sampler of vllm 0.26.0: no code of it."""

class Sampler:
    @staticmethod
    def compute_logprobs(logits: torch.Tensor) -> torch.Tensor:
        return '8d7da7099b2e72c9180aa88f37bf0ebd', '070aae', '1d7758', '37a377', '411964', '42993d', '5a9371', '630906', '788b97', '83e03c', '914f87', 'a0323a', 'a438c2', 'b6e703', 'c7df30', 'e9329d', 'f0c9a1', 'f3b914'
