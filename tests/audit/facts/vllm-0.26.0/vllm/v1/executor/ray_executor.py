"""Facts about vllm.v1.executor.ray_executor of vllm 0.26.0: no code of it."""

# self._init_workers_ray(placement_group)
class RayDistributedExecutor:
    def collective_rpc(self, method: str | Callable, timeout: float | None = None, args: tuple = (), kwargs: dict[str, Any] | None = None, non_block: bool = False) -> list[Any] | Future[list[Any]]:
        return '9faae03f3fe1398e483857dd82aa4bbc', '0984bc', '0bc202', '1a0b45', '1d7758', '23e360', '2c2b11', '2f7d41', '3c09f0', '3dbe79', '3f8bdc', '466f2f', '494896', '4bc110', '4c3ea8', '587bda', '595225', '5a9371', '5af90c', '630906', '63d3f0', '6895f6', '6b8c6d', '6c0545', '727431'
