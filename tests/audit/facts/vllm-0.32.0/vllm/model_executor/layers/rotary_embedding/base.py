"""Facts about vllm.model_executor.layers.rotary_embedding.base of vllm 0.32.0: no code of it."""

class RotaryEmbeddingBase:
    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        return '6130ce4dbbc12fed6421af066e8bcd98', '01d01f', '070aae', '0a0068', '1d7758', '227449', '3d3193', '5a9371', '630906', '770dbe', '788b97', '7a67e7', '7aef5a', '83e36c', '858bf8', '8e6a32', '94e3ec', 'a0323a', 'b4ca75', 'b6e703', 'ba2fd8', 'bff964', 'c79280', 'd33ff2', 'f3b914'
