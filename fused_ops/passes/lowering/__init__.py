"""What Inductor is told of weft's ops."""
