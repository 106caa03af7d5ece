"""Facts about vllm.v1.kv_offload.tiering.fs.io of vllm 0.26.0: no code of it."""

def load_block(source_path: str, view: memoryview, offset: int, block_size: int) -> None:
    return '3db0d787880781f27beed2173c6b4ed7', '0e9a7b', '11ad5c', '1d7758', '2542a0', '257597', '2e443e', '36a574', '379544', '382dc7', '392262', '3dae78', '3de73a', '3f8bdc', '3f994a', '466f2f', '494896', '4a7da7', '54fcec', '5947b3', '5af90c', '5e237e', '630906', '6a9703', '6e5fdf'
