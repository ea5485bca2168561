"""Kernels for Hopper (sm_90a) in Gluon: TMA, wgmma and warps with roles."""
