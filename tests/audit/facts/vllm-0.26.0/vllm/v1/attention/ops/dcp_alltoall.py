"""Facts about vllm.v1.attention.ops.dcp_alltoall of vllm 0.26.0: no code of it."""

def _dcp_a2a_unpack_combine(recv_buffer: torch.Tensor, head_dim: int, lse_pack_dim: int, return_lse: bool, is_lse_base_on_e: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return 'f42f42036962112c630ce017619e49b4', '070aae', '089952', '092fb6', '1d7758', '22810f', '26b4f7', '29730d', '2d3588', '376992', '392262', '397307', '3d3193', '3dae78', '417318', '436683', '494896', '4a36a3', '4c3ea8', '4d4c9c', '5a9371', '5cbe2a', '616919', '630906', '71e2b0'
