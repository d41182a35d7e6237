"""What calls and backends need of the host: array descriptions, the disk cache, the machine's name."""
