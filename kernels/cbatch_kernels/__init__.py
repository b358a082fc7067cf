"""The compute kernels of cbatch: one file per op with its plain PyTorch reference, `dispatch` chooses between them.

Imports nothing of `cbatch`. `kernels/` itself holds no `__init__.py`: it would shadow Hugging Face's package `kernels`.
"""
