"""Plain Triton kernels: every feature of the contract, on any GPU that Triton compiles for."""
