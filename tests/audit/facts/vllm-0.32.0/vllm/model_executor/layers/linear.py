"""Facts about vllm.model_executor.layers.linear of vllm 0.32.0: no code of it."""

from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant
from vllm.model_executor.layers.utils import dispatch_unquantized_gemm
class ReplicatedLinear:
    pass
class RowParallelLinear:
    def forward(self, input_) -> torch.Tensor | tuple[torch.Tensor, Parameter | None]:
        return 'd065ea53382e3f46c4580c88abba2236', '01a345', '0984bc', '1d7758', '26523f', '3048bb', '33e010', '3aa74c', '3bf95d', '3dae78', '3f8bdc', '3fb8dd', '494896', '4c3ea8', '58ecc0', '5a9371', '5af90c', '5be626', '630906', '727431', '788b97', '7a67e7', '7aef5a', '7d0758', '7e838c'
class UnquantizedLinearMethod:
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return '71d0533f8c53219acd0befc2f3a2697a', '1d7758', '1ef821', '3aa74c', '3fb8dd', '494896', '55bb83', '5efbb8', '5f3ddc', '630906', '78484e', '7d0758', '7f41e6', '83e38b', '883351', 'a0323a', 'a1c519', 'b3bfbf', 'b4e169', 'ba2fd8', 'c4b322', 'cb9955', 'd041c7', 'd87f7e', 'dba80b'
