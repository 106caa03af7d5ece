"""Facts about vllm.model_executor.layers.layernorm of vllm 0.32.0: no code of it."""

class RMSNorm:
    def forward_cuda(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return 'b4e438c7093f3009e71c6121b066e3f4', '0a0068', '1d7758', '1ef821', '2542a0', '34644a', '3f8bdc', '494896', '4c3ea8', '5a9371', '5af90c', '5f3ddc', '61189a', '630906', '688a5f', '727431', '788b97', '7a67e7', '7aef5a', '7cc532', '825b6c', '8930f5', '95d1fd', 'a0323a', 'a746f7'
    def forward_native(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return '3238d2bc0f46deefa66f64353b01aab0', '1d7758', '29a3db', '34644a', '3f8bdc', '494896', '4c3ea8', '5af90c', '61189a', '630906', '727431', '78484e', '790c90', '798a24', '7a67e7', '825b6c', '8930f5', '8e4498', 'a0323a', 'a96ec6', 'b16ac1', 'b4e169', 'b73cff', 'ba2fd8', 'bf8d25'
