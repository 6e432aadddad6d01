"""What a fallback graph needs beside its text."""
