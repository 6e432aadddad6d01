"""The main loop of B200 and B300: tcgen05 and tensor memory."""
