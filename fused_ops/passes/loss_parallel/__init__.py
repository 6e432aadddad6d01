"""Losses of gathered logits, which become losses of each rank's own columns: nothing but two numbers a row is sent."""
