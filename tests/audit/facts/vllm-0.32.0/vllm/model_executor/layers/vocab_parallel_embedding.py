"""Facts about vllm.model_executor.layers.vocab_parallel_embedding of vllm 0.32.0: no code of it."""

from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
def get_masked_input_and_mask(input_: torch.Tensor, org_vocab_start_index: int, org_vocab_end_index: int, num_org_vocab_padding: int, added_vocab_start_index: int, added_vocab_end_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    return '99243270997352dfd745f747807f804c', '0f9769', '1d7758', '382dc7', '3f8bdc', '43d42c', '4886c4', '494896', '4a7da7', '5af90c', '604fc4', '612132', '630906', '658fb1', '727431', '7a67e7', '7aef5a', '83e03c', '842064', '86679a', 'a0323a', 'b4ca75', 'c0c29b', 'c359bd', 'c55735'
class VocabParallelEmbedding:
    def forward(self, input_):
        return '11559a164211d72aada4eec8a575532c', '01a345', '0a8cb8', '0f6545', '15928d', '1704cf', '18f62b', '1bae2c', '1c4c1a', '1d7758', '21efd4', '2542a0', '26523f', '3048bb', '3f8bdc', '42993d', '4473b3', '494896', '4b6b1e', '4c3ea8', '4d4c9c', '54d992', '5af90c', '5f058a', '630906'
