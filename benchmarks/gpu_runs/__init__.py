"""The runs of ``benchmarks/gpu.py``; each is a process of its own."""
