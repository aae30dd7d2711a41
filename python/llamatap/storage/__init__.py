"""Storage: cache folder, atomic writes, locks, file hashes, saved sequences, safetensors metadata."""
