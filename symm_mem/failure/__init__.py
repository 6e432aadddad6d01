"""What happens when a rank is late, differs or is gone."""
