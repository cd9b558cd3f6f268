"""What runs on a user's NVIDIA GPU: micro-benchmarks and attention calls.

PyTorch, Triton and CUDA's Python bindings come with `pip install 'iosim[gpu]'`; nothing here imports them before a GPU
is asked for.
"""
