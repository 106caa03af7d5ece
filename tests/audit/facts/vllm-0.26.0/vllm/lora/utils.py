"""Facts about vllm.lora.utils of vllm 0.26.0: no code of it."""

def is_supported_lora_module(module_name: str, supported_lora_modules: list[str]) -> bool:
    return '85932c9eae7a3f1bbe14cdd91208530f', '052ec1', '0846d6', '1d7758', '23e360', '2f7d41', '301df7', '352ef3', '3aa74c', '3f8bdc', '466f2f', '494896', '4bc110', '50147b', '5a9371', '5af90c', '610f71', '630906', '6d964e', '727431', '788b97', '7a67e7', '7cc532', '7d5d89', '7e838c'
