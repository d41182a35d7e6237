"""The Metal backend. For now its runner: Metal kernels compiled as C++ and run on the CPU, checked."""
