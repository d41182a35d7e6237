"""A decorated kernel: from a call to a program to a launch."""
