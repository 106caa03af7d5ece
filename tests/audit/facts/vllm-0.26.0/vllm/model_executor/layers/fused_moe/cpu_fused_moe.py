"""Facts about vllm.model_executor.layers.fused_moe.cpu_fused_moe of vllm 0.26.0: no code of it."""

class CPUFusedMOE:
    def forward_grouped_gemm(self, layer: torch.nn.Module, input: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: MoEActivation, global_num_experts: int = -1, skip_weighted: bool = False) -> torch.Tensor:
        return '257f0b1f8c2a472f696e01eb64216ea9', '11398b', '18088c', '195411', '1d7758', '3bf95d', '3cc69f', '3cf5f3', '3f8bdc', '3f93a3', '4487b2', '494896', '4d4c9c', '57316a', '5af90c', '5bcc72', '630906', '688a5f', '6e579d', '727431', '7a67e7', '7aef5a', '7d0758', '7e838c', '82a6cc'
