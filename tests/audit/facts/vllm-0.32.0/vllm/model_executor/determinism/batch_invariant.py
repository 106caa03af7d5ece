"""Facts about vllm.model_executor.determinism.batch_invariant of vllm 0.32.0: no code of it."""

def linear_batch_invariant(input, weight, bias=None):
    return 'e08762516e6c388cb1a94875701c8648', '00fe4a', '0bc202', '1d7758', '1db6ae', '2542a0', '331c64', '3bf95d', '3dae78', '3f8bdc', '42876a', '42993d', '494896', '5a9371', '5af90c', '630906', '676a12', '6e5fdf', '727431', '788b97', '7a67e7', '7aef5a', '7cc532', '7e838c', '7f41e6'
def matmul_persistent(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None):
    return 'd31f11e15cb70ebf33c742649bfb9edf', '0276d8', '033716', '070aae', '08fd57', '092fb6', '094f27', '161b2e', '182902', '191b54', '1a71e9', '1d7758', '200318', '22810f', '2542a0', '25b4ea', '2bc338', '2e20d9', '3048bb', '36bfab', '397307', '3aa74c', '3d3193', '3dae78', '3f596a'
def softmax_batch_invariant(input, dim, half_to_float=False):
    return '041acab377445ce0a23f07f2c8a8144a', '0984bc', '147954', '1d7758', '325ff1', '37a377', '3aa74c', '3f8bdc', '42993d', '494896', '4b696f', '538937', '544a8d', '565541', '597e0d', '5a9371', '5af90c', '604fc4', '630906', '727431', '788b97', '7a67e7', '7aef5a', '7e838c', '7f41e6'
