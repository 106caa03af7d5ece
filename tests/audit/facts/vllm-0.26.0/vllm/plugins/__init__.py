"""Facts about vllm.plugins of vllm 0.26.0: no code of it."""

def load_general_plugins():
    return '394eb0a73bf13409ad63c2fb8a25a362', '0846d6', '1d7758', '466f2f', '494896', '544a8d', '5a9371', '630906', '6dc044', '77ea67', '788b97', '7aef5a', '7f41e6', '83924a', '85426d', '898b70', '921328', 'a0323a', 'aaad52', 'c4b322', 'd1aa44', 'd7384f', 'd87f7e', 'dba80b', 'decf40'
