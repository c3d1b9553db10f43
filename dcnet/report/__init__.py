"""Records and registries made into tables and pictures."""
