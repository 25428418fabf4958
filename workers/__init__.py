"""Worker processes: an inference engine and the shell that joins it to Redis."""
