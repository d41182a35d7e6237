"""The Metal backend: kernels as Metal Shading Language, and a runner that checks such text on any machine."""
