"""Facts about vllm.v1.engine.async_llm of vllm 0.26.0: no code of it."""

class AsyncLLM:
    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None):
        return '3d1147970ebd9f75edd8d80df626e5c3', '1d7758', '587bda', '630906', '78484e', 'a0323a', 'a97e73', 'ba2fd8', 'bc6ec7', 'd77fcf', 'e0e43c', 'e4d961', 'ff1bda'
    async def pause_generation(self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True) -> None:
        return '87dc01d76c8d3464bd535575fc2c494f', '0bc202', '0cac8e', '1d7758', '25dc24', '29590b', '388133', '3d3193', '4575f0', '494896', '56aea6', '5a9371', '5bc1eb', '5db67e', '629526', '630906', '683cac', '788b97', '7aef5a', '7e838c', '7ec377', '7f41e6', '914f87', '97ca47', 'b02d08'
    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        return '74d7093376a963d91c37a7ff79bba771', '10bc6a', '1a3e0d', '1d7758', '2542a0', '388133', '3f8bdc', '494896', '56aea6', '5af90c', '5bc1eb', '630906', '727431', '7a67e7', '7cc532', '7f41e6', 'a438c2', 'ba2fd8', 'c4b322', 'c7714b', 'd626c1', 'd87f7e', 'dba80b', 'dff4f4', 'e0e43c'
