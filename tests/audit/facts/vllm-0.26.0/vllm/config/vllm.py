"""Facts about vllm.config.vllm of vllm 0.26.0: no code of it."""

class VllmConfig:
    def _is_default_v2_model_runner_model(self) -> bool:
        return '4b49956cb36697fb21bbbc9b7fbe4790', '1d7758', '23e360', '2baa33', '2f7d41', '3048bb', '3976c3', '3aa74c', '3f8bdc', '466f2f', '494896', '4bc110', '4cecee', '5258b1', '5af90c', '610f71', '630906', '727431', '77d95d', '7a67e7', '7aef5a', '7d0758', '7d5d89', '7e838c', '83e03c'
    def use_v2_model_runner(self) -> bool:
        return 'eae66f8da27a318e50e85dc055db37b5', '0394e7', '04d24e', '08e268', '09d176', '0c29c9', '1d7758', '1ef821', '2542a0', '3048bb', '3aa74c', '3f8bdc', '3fb8dd', '488ccf', '494896', '544a8d', '5af90c', '630906', '63f9eb', '6f595a', '727431', '7a67e7', '7aef5a', '7c8654', '7cc532'
