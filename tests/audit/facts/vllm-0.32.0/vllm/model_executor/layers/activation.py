"""Facts about vllm.model_executor.layers.activation of vllm 0.32.0: no code of it."""

class GeluAndMul:
    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        return '51ffcbe1774cfac7bc2f7c5bf2ed8414', '0984bc', '0b6f56', '0e9a7b', '1d7758', '21c9c9', '2518b0', '2861c0', '3aa74c', '3b0ce1', '3d3193', '3dae78', '3f8bdc', '3fb8dd', '42993d', '494896', '5a9371', '5af90c', '5f6b40', '630906', '6a422f', '6e5fdf', '727431', '788b97', '7a67e7'
class SiluAndMul:
    @staticmethod
    def forward_native(x: torch.Tensor) -> torch.Tensor:
        return 'f86620a4167e7f6066467183d77b7090', '0e9a7b', '1d7758', '2518b0', '2861c0', '3d3193', '3dae78', '42993d', '630906', '6e5fdf', '6f7838', '7a67e7', '7aef5a', '7e838c', '83e03c', '842064', '9776cd', '9ffa26', 'a0323a', 'a438c2', 'b4ca75', 'c79280', 'c7df30', 'd041c7', 'e479ad'
