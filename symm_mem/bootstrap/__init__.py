"""How ranks meet: the store, rendezvous, handshake, exchange of file descriptors."""
