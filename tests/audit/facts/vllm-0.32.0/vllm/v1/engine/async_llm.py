"""Facts about vllm.v1.engine.async_llm of vllm 0.32.0: no code of it."""

class AsyncLLM:
    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None):
        return '3d1147970ebd9f75edd8d80df626e5c3', '1d7758', '587bda', '630906', '78484e', 'a0323a', 'a97e73', 'ba2fd8', 'bc6ec7', 'd77fcf', 'e0e43c', 'e4d961', 'ff1bda'
    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        return 'a871dc643e816ac7c4a4bf2101f4789b', '0cac8e', '1d7758', '29590b', '388133', '4575f0', '494896', '56aea6', '5a9371', '5bc1eb', '629526', '630906', '788b97', '7e838c', '7f41e6', '914f87', '97ca47', 'b3a4ee', 'ba2fd8', 'c4b322', 'd347ef', 'd87f7e', 'dba80b', 'e0e43c', 'efda7a'
    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        return '74d7093376a963d91c37a7ff79bba771', '10bc6a', '1a3e0d', '1d7758', '2542a0', '388133', '3f8bdc', '494896', '56aea6', '5af90c', '5bc1eb', '630906', '727431', '7a67e7', '7cc532', '7f41e6', 'a438c2', 'ba2fd8', 'c4b322', 'c7714b', 'd626c1', 'd87f7e', 'dba80b', 'dff4f4', 'e0e43c'
