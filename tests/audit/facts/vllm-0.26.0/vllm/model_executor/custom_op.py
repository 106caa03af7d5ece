"""Facts about vllm.model_executor.custom_op of vllm 0.26.0: no code of it."""

class CustomOp:
    def dispatch_forward(self, compile_native: bool):
        return 'c3f96fd29536f18de6b0b148e6653285', '08e9d5', '0984bc', '1b0327', '1d14ea', '1d7758', '2acc28', '2b0909', '3048bb', '3aa74c', '3bd6f7', '420712', '444bcb', '45bcd1', '45c8cf', '494896', '55bb83', '5a9371', '5c91a0', '5ca17a', '5f6b40', '6199cb', '630906', '6dd609', '788b97'
