"""What fuses: one file a form."""
