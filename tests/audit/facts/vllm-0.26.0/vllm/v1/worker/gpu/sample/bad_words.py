"""Facts about vllm.v1.worker.gpu.sample.bad_words of vllm 0.26.0: no code of it."""

MAX_NUM_BAD_WORDS = 128
