"""Runs Metal Shading Language on the CPU, thread by thread, and checks everything a kernel does to memory."""
