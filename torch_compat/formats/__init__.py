"""File formats of checkpoints: DCP, safetensors, zip, pickle, OCDBT."""
