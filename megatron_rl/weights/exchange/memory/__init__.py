"""What an exchange does otherwise in host memory than on a device; for trainer and engine ranks."""
