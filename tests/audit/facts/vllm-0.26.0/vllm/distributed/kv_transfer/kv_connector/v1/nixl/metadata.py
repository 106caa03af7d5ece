"""Facts about vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata of vllm 0.26.0: no code of it."""

NIXL_CONNECTOR_VERSION = 5
