"""Run Metal Shading Language on the CPU, thread by thread, and check every memory access of a kernel."""
