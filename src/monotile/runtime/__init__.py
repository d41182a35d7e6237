"""Host services for calls and backends: array descriptions, the disk cache, the machine's name."""
