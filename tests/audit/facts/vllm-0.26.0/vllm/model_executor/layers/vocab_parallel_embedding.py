"""Facts about vllm.model_executor.layers.vocab_parallel_embedding of vllm 0.26.0: no code of it."""

from vllm.model_executor.layers.batch_invariant import linear_batch_invariant
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
def get_masked_input_and_mask(input_: torch.Tensor, org_vocab_start_index: int, org_vocab_end_index: int, num_org_vocab_padding: int, added_vocab_start_index: int, added_vocab_end_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return '99243270997352dfd745f747807f804c', '0f9769', '1d7758', '382dc7', '3f8bdc', '43d42c', '4886c4', '494896', '4a7da7', '5af90c', '604fc4', '612132', '630906', '658fb1', '727431', '7a67e7', '7aef5a', '83e03c', '842064', '86679a', 'a0323a', 'b4ca75', 'c0c29b', 'c359bd', 'c55735'
class VocabParallelEmbedding:
    def forward(self, input_):
        return '65283b3b824a0b52b1339bc2fa4f30e1', '01a345', '0a8cb8', '15928d', '18f62b', '1bae2c', '1c4c1a', '1d7758', '26523f', '3bf95d', '3f8bdc', '42993d', '494896', '4b6b1e', '54d992', '5af90c', '630906', '727431', '7a67e7', '7aef5a', '7bcc9a', '7cc532', '7e838c', '7f41e6', '83e03c'
