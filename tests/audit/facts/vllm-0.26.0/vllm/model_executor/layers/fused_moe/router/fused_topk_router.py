"""Facts about vllm.model_executor.layers.fused_moe.router.fused_topk_router of vllm 0.26.0: no code of it."""

def fused_topk(hidden_states: torch.Tensor, gating_output: torch.Tensor, topk: int, renormalize: bool, indices_type: torch.dtype | None = None, scoring_func: str = "softmax") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return '418cc0551dce4fcf6e7428133e9d8fb8', '036d8a', '070aae', '0846d6', '092fb6', '0de75d', '14938d', '1ac5e4', '1d7758', '22810f', '3cc69f', '3f8bdc', '417318', '471718', '494896', '4c3ea8', '5a9371', '5af90c', '630906', '688a5f', '69ad31', '6e579d', '727431', '788b97', '797183'
