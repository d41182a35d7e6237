"""The library: attention and its parts, with their argument checks, prepared calls and test cases."""
