"""Facts about vllm.config.vllm of vllm 0.32.0: no code of it."""

class VllmConfig:
    def use_v2_model_runner(self) -> bool:
        return 'b96b725251d40ff449adcb7dca24eed0', '0394e7', '04d24e', '08e268', '097a97', '09d176', '1d7758', '1ef821', '2542a0', '3048bb', '3f8bdc', '488ccf', '494896', '4c8d07', '544a8d', '5af90c', '630906', '6f595a', '727431', '756f7e', '79a7b4', '7a67e7', '7aef5a', '7c8654', '7cc532'
