"""What runs on a GPU, in Triton: kernels only. Their launchers lie beside their references."""
