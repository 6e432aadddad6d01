"""The process group ``"weft"``: gloo and NCCL, with what weft does faster taken from them."""
