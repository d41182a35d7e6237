"""What users call: attention and its parts, their checks, block sizes and float64 definitions."""
