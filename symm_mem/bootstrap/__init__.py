"""How ranks join: the store, rendezvous, handshake, exchange of file descriptors."""
