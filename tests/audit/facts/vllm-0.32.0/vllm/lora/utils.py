"""Facts about vllm.lora.utils of vllm 0.32.0: no code of it."""

def is_supported_lora_module(module_name: str, module: nn.Module, supported_lora_modules: list[str]) -> bool:
    return '29389665bc22c1e18ff91051ef422b1a', '00f4ec', '03e648', '1d7758', '33d35c', '352ef3', '3dae78', '3f8bdc', '42993d', '494896', '4e2552', '50147b', '53c47f', '5af90c', '630906', '65886a', '727431', '7a67e7', '7aef5a', '7cc532', '7e838c', '83e03c', '84188c', '863a22', '9aed8e'
