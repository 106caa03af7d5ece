"""Facts about vllm.model_executor.models.qwen3_moe of vllm 0.32.0: no code of it."""

class Qwen3MoeAttention:
    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return '2461051f718d763eab5888811e558600', '03c180', '0984bc', '14e119', '1c32ad', '1d7758', '32479b', '37a377', '3bf95d', '3dae78', '417318', '42993d', '4b8a1a', '510191', '5a9371', '60c7ec', '630906', '676a12', '6ce630', '6e5fdf', '7264d2', '788b97', '7a67e7', '7aef5a', '7d0758'
class Qwen3MoeSparseMoeBlock:
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 'dc6a12fe4b2541e84a6dec470d2928ab', '00b873', '0ffede', '11a74f', '1d7758', '3d3193', '3dae78', '3f8bdc', '4019cc', '42993d', '494896', '4a9e4c', '4c3ea8', '507661', '553a5f', '5a9371', '5af90c', '5c0f66', '630906', '676a12', '688a5f', '6e5fdf', '727431', '788b97', '7a67e7'
