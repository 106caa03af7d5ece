"""Facts about vllm.model_executor.layers.batch_invariant of vllm 0.26.0: no code of it."""

def linear_batch_invariant(input, weight, bias=None):
    return '7ca53db0bf2436ec789de99d779ada81', '1d7758', '1db6ae', '2542a0', '3bf95d', '3f8bdc', '494896', '5af90c', '630906', '727431', '7a67e7', '7aef5a', '7cc532', '7f41e6', '83e38b', '9d360a', 'a0323a', 'a12d29', 'b4ca75', 'c4b322', 'c55735', 'c79280', 'd626c1', 'd87f7e', 'dba80b'
def matmul_persistent(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None):
    return '7d66a6c95303b2b1177b4944ef5c7a0e', '0276d8', '033716', '070aae', '08fd57', '092fb6', '094f27', '161b2e', '182902', '191b54', '1a71e9', '1d7758', '200318', '22810f', '2542a0', '25b4ea', '2bc338', '2e20d9', '36bfab', '397307', '3aa74c', '3d3193', '3dae78', '3f596a', '3f8bdc'
def softmax_batch_invariant(input, dim, dtype=None):
    return '8b46173205899c8fa20225f5fc8df20d', '1d7758', '325ff1', '37a377', '4b696f', '538937', '544a8d', '565541', '597e0d', '5a9371', '604fc4', '630906', '788b97', '7a67e7', '7aef5a', '7e838c', '858bf8', '908ded', '98568c', '9d360a', 'a0323a', 'b4ca75', 'b6e703', 'beebaf', 'c79280'
